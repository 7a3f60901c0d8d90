"""The scikit-learn estimators: scikit-learn's own checks, sites, and the same weights as a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.model_selection import LeaveOneGroupOut, cross_val_score
from sklearn.utils import check_array

import fedshift
from fedshift.errors import UserError
from fedshift.estimator import FederatedClassifier, FederatedRegressor, FederatedSurvival
from tried import slow

SITES = np.repeat(["a", "b", "c"], [20, 16, 24])
TRAINING = {"rounds": 3, "batch_size": 8, "lr": 0.05}


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(len(SITES)) % 2
    return rng.normal(size=(len(SITES), 4)) * [1, 5, 1, 1] + 2.0 * y[:, None], y


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg", "average": "ema", "server": "momentum"},
        {"name": "scaffold"},
        {"name": "fedavg", "robust": "median"},
    ],
)
def test_its_weights_are_those_of_a_run_with_the_same_sites(
    method: dict[str, Any], samples: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = samples
    for site in "abc":
        np.savez(tmp_path / f"{site}.npz", x=x[site == SITES], y=y[site == SITES])
    np.savez(tmp_path / "unseen.npz", x=x[:9], y=y[:9])
    model = {"name": "mlp", "hidden": [5]}
    estimator = FederatedClassifier(method, model, training={"momentum": 0.9}, **TRAINING).fit(x, y, sites=SITES)
    run = {
        "data": {
            "name": "arrays",
            "sites": {s: tmp_path / f"{s}.npz" for s in ("a", "b", "c", "unseen")},
            "standardise": True,
        },
        "protocol": {"targets": ["unseen"], "seeds": [np.random.RandomState(0).randint(2**31)], "test_fraction": 0},
        "model": model,
        "training": {**TRAINING, "momentum": 0.9},
        "methods": [{**method, "label": "m"}],
        "engine": {"threads": torch.get_num_threads()},
        "device": "cpu",
    }
    folder = fedshift.run(run, tmp_path / "runs").collected.runs[0].folder
    there = load_file(folder / "model.safetensors")
    here = estimator.model_.trained.network.state_dict()
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert np.array_equal(estimator.predict_proba(x), fedshift.Model.load(folder).predict_proba(x))


def test_leave_one_group_out_trains_on_the_other_sites(samples: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = samples
    seen: list[list[str]] = []

    class Noting(FederatedClassifier):
        def fit(self, X: Any, y: Any, sites: Any = None) -> Noting:
            seen.append(sorted(set(sites)))
            return super().fit(X, y, sites=sites)

    estimator = Noting(**TRAINING)
    plain = cross_val_score(estimator, x, y, groups=SITES, cv=LeaveOneGroupOut(), params={"sites": SITES})
    assert seen == [["b", "c"], ["a", "c"], ["a", "b"]]
    with sklearn.config_context(enable_metadata_routing=True):
        routed = cross_val_score(
            clone(estimator).set_fit_request(sites=True),
            x,
            y,
            cv=LeaveOneGroupOut(),
            params={"groups": SITES, "sites": SITES},
        )
    assert plain.tolist() == routed.tolist()


def test_sites_matter_and_models_are_saved_and_loaded(samples: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    x, y = samples
    apart = FederatedClassifier(**TRAINING).fit(x, np.array(["no", "yes"])[y], sites=SITES)
    assert apart.sites_.tolist() == ["a", "b", "c"]
    assert set(apart.predict(x)) <= {"no", "yes"}
    numbers = sum(tensor.numel() for tensor in apart.model_.trained.network.parameters())
    assert apart.bytes_up_["weights"] == 3 * TRAINING["rounds"] * numbers * 4
    assert not np.array_equal(FederatedClassifier(**TRAINING).fit(x, y).predict_proba(x), apart.predict_proba(x))
    x, y = samples
    estimator = FederatedClassifier("fedsr", **TRAINING).fit(x, y, sites=SITES)
    estimator.model_.save(tmp_path / "m.safetensors")
    assert np.array_equal(fedshift.Model.load(tmp_path / "m.safetensors").predict_proba(x), estimator.predict_proba(x))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "fedagv"}, "fedavg"),
        ({"method": "kd3a"}, "target"),
        ({"lr": -1}, "training.lr"),
        ({"model": "unet"}, "segmentation"),
        ({"training": {"round": 3}}, "rounds"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], word: str, samples: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(UserError, match=word):
        FederatedClassifier(**options).fit(*samples)


def test_a_regressor_learns_at_each_site_and_is_scored_at_a_new_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(SITES), 3))
    y = 1000 + 50 * x[:, 0]
    estimator = FederatedRegressor("fedavg", "linear", rounds=15, loss="huber")
    scores = cross_val_score(estimator, x, y, groups=SITES, cv=LeaveOneGroupOut(), params={"sites": SITES})
    assert min(scores) > 0.9
    assert estimator.fit(x, y, sites=SITES).predict(x[:2]) == pytest.approx(y[:2], rel=0.05)


def survival(n: int = len(SITES)) -> tuple[np.ndarray, np.ndarray]:
    """Samples whose first column doubles the hazard; some leave before the event."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(n, 3))
    times, gone = 10 * draws.exponential(np.exp(-2 * x[:, 0])), draws.exponential(30, n)
    made = np.zeros(n, dtype=[("cens", bool), ("time", float)])
    made["cens"], made["time"] = times <= gone, np.minimum(times, gone)
    return x, made


class OnNumbers(FederatedSurvival):
    """For scikit-learn's checks, whose y are numbers: every event was seen."""

    def fit(self, X: Any, y: Any, sites: Any = None) -> OnNumbers:
        return super().fit(X, all_seen(y), sites)

    def score(self, X: Any, y: Any) -> float:
        return super().score(X, all_seen(y))


def all_seen(y: Any) -> np.ndarray:
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    numbers = np.asarray(check_array(y, ensure_2d=False, dtype=None)).ravel().astype(float)
    return np.array([(True, one) for one in numbers - numbers.min()], dtype=[("event", bool), ("time", float)])


@pytest.mark.parametrize("kind", [FederatedClassifier, slow(FederatedRegressor), slow(OnNumbers)])
def test_scikit_learn_accepts_it(kind: type[FederatedClassifier | FederatedRegressor | OnNumbers]) -> None:
    from sklearn.utils.estimator_checks import check_estimator  # takes a second, in every process that collects tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(kind(rounds=5))
    assert len(found) > 40
    assert {one["status"] for one in found} <= {"passed", "skipped"}


def test_survival_has_scikit_survivals_convention() -> None:
    x, y = survival()
    estimator = FederatedSurvival("fedprox", "linear", rounds=10)
    scores = cross_val_score(estimator, x, y, groups=SITES, cv=LeaveOneGroupOut(), params={"sites": SITES})
    assert min(scores) > 0.7
    risks = estimator.fit(x, y, sites=SITES).predict(x)
    utils = pytest.importorskip("lifelines.utils")
    assert estimator.score(x, y) == pytest.approx(utils.concordance_index(y["time"], -risks, y["cens"]))
    late = y.copy()
    late["cens"] = False
    for wrong, word in ((y["time"], "structured"), (late, "no event"), (y[["time", "cens"]], "structured")):
        with pytest.raises(ValueError, match=word):
            estimator.fit(x, wrong, sites=SITES)
    with pytest.raises(ValueError, match="compared"):
        estimator.score(x, late)


@pytest.mark.case("identifiers", "the estimators: a column of names, labels of one value per row")
def test_no_value_of_a_column_of_text_is_shown_or_kept() -> None:
    names = [f"Doe {row}" for row in range(40)]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.arange(40.0), "who": names})
    y = np.arange(40) % 2
    event = np.array([(True, 1.0)] * 40, dtype=[("event", bool), ("time", float)])
    for X, column in ((frame, "'who'"), (frame.to_numpy(), "1"), (np.array([names, names]).T, "0")):
        for estimator, labels in ((FederatedClassifier(), y), (FederatedRegressor(), y), (FederatedSurvival(), event)):
            with pytest.raises(
                ValueError, match=f"column {column} holds text, 40 different values in 40 rows"
            ) as caught:
                estimator.fit(X, labels)
            assert "Doe" not in str(caught.value)
    with pytest.raises(ValueError, match="y has 40 different values in 40 samples") as caught:
        FederatedClassifier().fit(np.zeros((40, 2)), np.array(names))
    assert "Doe" not in str(caught.value)


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_counts_are_numbers_whatever_their_type(kind: Any, samples: tuple[np.ndarray, np.ndarray]) -> None:
    _, y = samples
    x = np.random.default_rng(0).integers(0, 9, (len(y), 4))
    here, there = (
        FederatedClassifier(rounds=1, batch_size=8).fit(x.astype(each), y, sites=SITES) for each in (kind, np.float64)
    )
    assert np.array_equal(here.predict_proba(x.astype(kind)), there.predict_proba(x.astype(np.float64)))
