"""Time to event from data to predictions, against lifelines and torchsurv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedshift
from fedshift.data.registry import parse
from fedshift.errors import UserError
from fedshift.evaluation.measuring import concordance
from fedshift.functional.survival import partial_likelihood


def patients(number: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Samples whose first column doubles the hazard; a third of them leave before the event."""
    draws = np.random.default_rng(number)
    x = draws.normal(size=(n, 3)).astype(np.float32)
    times = np.ceil(10 * draws.exponential(np.exp(-1.2 * x[:, 0])))  # whole numbers: some events at one time
    gone = np.ceil(draws.exponential(30, n))
    return x, np.stack([np.minimum(times, gone), times <= gone], axis=1)


@pytest.mark.slow  # torchsurv takes seconds to import
@pytest.mark.filterwarnings("ignore:Ties")
@pytest.mark.parametrize("ties", [False, True])
def test_the_loss_is_that_of_torchsurv(ties: bool) -> None:
    cox = pytest.importorskip("torchsurv.loss.cox")
    _, labels = patients(0)
    times = torch.from_numpy(labels[:, 0] if ties else np.random.default_rng(0).permutation(60) + 1.0)
    events = torch.from_numpy(labels[:, 1])
    risks = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    expected = cox.neg_partial_log_likelihood(risks, events.bool(), times, ties_method="efron", reduction="sum")
    found = events.sum() * partial_likelihood(risks, times, events)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # torchsurv computes in float32
    (one,), (other,) = (torch.autograd.grad(loss, risks) for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_ties_by_hand_and_a_batch_without_events() -> None:
    """Two events at one time beside one sample left: log(1+2+4) + log(7 - 3/2) - log 1 - log 2, over two events."""
    risks = torch.tensor([1.0, 2.0, 4.0]).log().requires_grad_()
    times, events = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([1.0, 1.0, 0.0])
    expected = (np.log(7) + np.log(5.5) - np.log(2)) / 2
    assert float(partial_likelihood(risks, times, events)) == pytest.approx(expected)
    partial_likelihood(risks, times, torch.zeros(3)).backward()
    assert risks.grad.tolist() == [0, 0, 0]
    far = torch.tensor([1000.0, 0.0, -1000.0])
    assert float(partial_likelihood(far, times, events)) == pytest.approx(500 + np.log(0.5) / 2)


def test_concordance_is_that_of_lifelines() -> None:
    utils = pytest.importorskip("lifelines.utils")
    for number in range(3):
        x, labels = patients(number, 300)
        risks = np.round(x[:, 0], 1)  # with ties
        expected = utils.concordance_index(labels[:, 0], -risks, labels[:, 1])
        assert concordance(risks, labels) == pytest.approx(100 * expected, abs=1e-9)
    assert concordance(np.zeros(3), np.array([[1.0, 0], [2.0, 0], [3.0, 0]])) is None


def options(sites: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "times",
        "data": {"sites": sites, "task": "time_to_event"},
        "protocol": {"targets": ["c"], "seeds": [0]},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 20, "mini_batches": 60, "batch_size": 64, "lr": 0.1},
        "methods": ["fedavg", "csac", "alone"],
        **changes,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Results:
    folder = tmp_path_factory.mktemp("times")
    return fedshift.run(options({site: patients(number) for number, site in enumerate("abc")}), folder / "runs")


def test_a_run_learns_who_has_the_event_sooner(results: fedshift.Results) -> None:
    frames = pytest.importorskip("pandas")
    for run in results.runs:
        (site,) = run.targets
        assert run.metric == "concordance"
        assert run.accuracy() == pytest.approx(site.values["concordance"])
        assert site.values["concordance"] > 65
        low, high = site.intervals["concordance"]
        assert low < site.values["concordance"] < high
    x, labels = patients(2)
    model = results.model("fedavg")
    assert concordance(model.predict(x), labels) == pytest.approx(
        next(run.accuracy() for run in results.runs if run.method == "fedavg"), abs=0.2
    )
    kept = frames.read_parquet(results.folder / "fedavg" / "c" / "seed-0" / "predictions.parquet")
    at_target = kept[kept.part == "target"]
    np.testing.assert_array_equal(at_target[["time", "event"]].to_numpy(), labels.astype(np.float32))
    assert "Concordance" in results.markdown() or "concordance" in results.markdown()
    assert "relative hazard" in model.card()


def test_both_sides_are_measured_and_compared_by_the_harmonic_mean(tmp_path: Path) -> None:
    sites = {site: patients(number) for number, site in enumerate("ab")}
    chosen = options(sites, methods=["fedavg"], protocol={"kind": "source_target", "splits": 1})
    chosen["training"] = {"rounds": 2, "batch_size": 64, "lr": 0.1}
    results = fedshift.run(chosen, tmp_path / "runs")
    for run in results.runs:
        a, b = run.source_accuracy(), run.accuracy()
        assert run.score() == pytest.approx(2 * a * b / (a + b))
    assert "concordances" in results.markdown()
    sites["b"] = (sites["b"][0], sites["b"][1] * [1, 0])
    with pytest.raises(UserError, match=r"'b' no two samples"):
        fedshift.check(chosen | {"data": {"sites": sites, "task": "time_to_event"}})
    sites = {site: patients(number) for number, site in enumerate("abc")}
    sites["c"] = (sites["c"][0], sites["c"][1] * [1, 0])
    with pytest.raises(UserError, match="no two samples can be compared"):
        fedshift.check(options(sites))


def test_a_table_with_columns_of_times_and_events(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,months,died\n1,3.5,1\n2,7,0\n")
    data = {"name": "table", "task": "time_to_event", "sites": {"a": tmp_path / "a.csv"}, "numeric": ["x"],
            "time": "months", "event": "died"}  # fmt: skip
    assert parse(data).build().domains["a"].labels.tolist() == [[3.5, 1.0], [7.0, 0.0]]
    for cells, said in (("-1,1", "time of 0 or more"), ("1,2", "1 where the event"), (",1", "missing")):
        (tmp_path / "a.csv").write_text(f"x,months,died\n1,3.5,1\n2,{cells}\n")
        with pytest.raises(UserError, match=said) as caught:
            parse(data).build()
        assert "line 3" in str(caught.value)
