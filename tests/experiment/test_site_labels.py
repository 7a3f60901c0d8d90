"""A site that has no labels, or few, takes part: it is never measured by labels that it does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedshift
from fedshift.cli.export import export
from fedshift.cli.predict import predict
from fedshift.data.domain import UNKNOWN
from fedshift.errors import UserError
from fedshift.report.page import page
from fedshift.report.report import whole_report
from tried import slow

COLUMNS = ["a", "b", "c"]


def patients(seed: int, n: int = 60, labels: bool = True) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 3))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.assign(ill=(rows @ [2.0, 1.0, 0.0] + rng.normal(size=n) > 0).astype(int)) if labels else frame


def table(sites: dict[str, pd.DataFrame], **fields: Any) -> dict[str, Any]:
    return {"name": "table", "sites": sites, "label": "ill", "numeric": COLUMNS, **fields}


def study(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "name": "study",
        "data": data,
        "protocol": {"kind": "leave_one_out", "seeds": [0]},
        "model": {"name": "mlp", "hidden": [8], "batch_norm": True},
        "training": {"rounds": 4, "batch_size": 16, "lr": 0.1},
        "methods": ["fedavg"],
        "evaluation": {"resamples": 0},
        "engine": {"threads": 1},
        "device": "cpu",
        **fields,
    }


ADAPT = {"kind": "adapt_to_one", "seeds": [0]}
PLAIN = {"kind": "leave_one_out", "seeds": [0]}
LABELLED = {name: patients(seed) for seed, name in enumerate(("north", "south", "east"))}
WITHOUT = {**LABELLED, "va": patients(9, labels=False)}
NONE = {"va": "none"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fedshift.api.Results:
    return fedshift.run(study(table(WITHOUT, site_labels=NONE)), tmp_path_factory.mktemp("runs"))


def test_a_site_without_labels_is_predicted_and_not_measured(finished: fedshift.api.Results) -> None:
    assert [run.target for run in finished.runs] == ["north", "south", "east"]  # only these are measured
    (unmeasured,) = finished.collected.unmeasured
    assert (unmeasured.result.target, unmeasured.result.accuracy(), unmeasured.result.sites[0].part) == (
        "va",
        None,
        "held_out",
    )
    told = finished.predictions("va")
    assert len(told) == 60
    assert set(told["part"]) == {"unlabelled"}
    assert told["label"].isna().all()
    # the same samples through the model file, which is another way to the same answers
    again = finished.model(target="va").predict_proba(patients(9, labels=False))
    assert np.allclose(told[["score_0", "score_1"]], again, atol=1e-6)


def test_an_estimate_stands_where_no_measure_can(finished: fedshift.api.Results) -> None:
    (estimate,) = finished.estimates["va"]["fedavg"]
    truth = patients(9)["ill"].to_numpy()
    right = 100 * float((finished.predictions("va")["predicted"].to_numpy() == truth.astype(str)).mean())
    assert estimate.sites == 3
    assert not estimate.abstain
    assert estimate.low <= right <= estimate.high
    # What `fedshift estimate` says, to which no file has the samples of the other sites.
    assert estimate == finished.model(target="va").estimate(patients(9, labels=False))
    said = finished.markdown()
    assert "va has no labels, so it is not measured. Accuracy there, estimated: fedavg" in said
    assert "| fedavg |" in said
    assert " va |" not in said
    assert finished.verdict()["without_labels"]["va"]["fedavg"][0]["estimate"] == estimate.estimate
    shown = page(whole_report(finished.collected))
    assert "Targets without labels" in shown
    assert f"{estimate.estimate:.1f}" in shown
    # For those who decide: the numbers in words, what is unlike, and what to do.
    assert f"we expect {estimate.estimate:.0f} of 100 answers to be right" in shown
    assert "Its samples look like those of the other sites." in shown
    assert "What to do: have some samples labelled to confirm it before use" in shown
    assert "fedshift estimate also looks at samples again where it can" in shown


@pytest.mark.parametrize(
    "method",
    [
        "kd3a",
        "shot",
        slow("fada"),
        "mdfnet",
        "recipe_unlabelled",
        "dsbn",
        {"name": "recipe", "batch_norm_at_new_site": None},
    ],
)
def test_it_trains_without_labels_under_every_kind_of_method(method: Any, tmp_path: Path) -> None:
    protocol = {"targets": ["va"], **(ADAPT if isinstance(method, str) else {"kind": "leave_one_out", "seeds": [0]})}
    data = table(WITHOUT, site_labels=NONE)
    done = fedshift.run(study(data, protocol=protocol, methods=[method], training={"rounds": 2}), tmp_path)
    (run,) = done.collected.unmeasured
    assert run.result.data["unlabelled_samples"] == ({"va": 60} if isinstance(method, str) else {})
    assert len(done.predictions("va")) == 60
    assert "too few sites" in done.markdown()
    assert "Targets without labels" in page(whole_report(done.collected))


@pytest.mark.slow
def test_labels_that_are_not_promised_decide_nothing(tmp_path: Path) -> None:
    scores = []
    for name, flipped in (("true", False), ("wrong", True)):
        va = patients(9)
        va["ill"] = 1 - va["ill"] if flipped else va["ill"]
        data = table({**LABELLED, "va": va}, site_labels=NONE)
        done = fedshift.run(study(data, protocol={**ADAPT, "targets": ["va"]}, methods=["shot"]), tmp_path / name)
        assert any("has labels in 60 rows, which are not read" in text for text in fedshift.check(study(data)).warnings)
        scores.append(done.predictions("va")["score_1"].to_numpy())
    assert np.array_equal(*scores)


def few(labelled: int = 20) -> pd.DataFrame:
    frame = patients(9)
    return frame.assign(ill=[label if row < labelled else None for row, label in enumerate(frame["ill"])])


def test_few_labels_either_measure_or_train(tmp_path: Path) -> None:
    protocol = {**ADAPT, "targets": ["va"]}
    done = fedshift.run(study(table({**LABELLED, "va": few()}, site_labels={"va": "few"}), protocol=protocol), tmp_path)
    (result,) = done.runs
    assert result.data["measured_samples"] == {"va": 20}
    assert result.data["unlabelled_samples"] == {"va": 40}
    told = done.predictions("va")
    measured = told[told["part"] == "target"]
    assert list(measured["row"]) == list(range(20))
    assert len(told) == 60
    assert result.accuracy() == pytest.approx(100 * float((measured["label"] == measured["predicted"]).mean()))
    data = table({**LABELLED, "va": few()}, site_labels={"va": "few_train"})
    done = fedshift.run(study(data, protocol={**ADAPT, "targets": "all"}), tmp_path / "train")
    assert [run.target for run in done.runs] == ["north", "south", "east"]  # neither va nor its labelled samples
    (run,) = done.collected.unmeasured
    split = run.result.data
    assert split["training_samples"]["va.labelled"] + split["held_out_samples"]["va.labelled"] == 20
    assert split["unlabelled_samples"] == {"va": 40}
    assert split["measured_samples"] == {}
    with pytest.raises(UserError, match="holds the labels that train"):
        fedshift.check(study(data, protocol={**ADAPT, "targets": ["va.labelled"]}))


def test_arrays_and_images_may_lack_labels(tmp_path: Path) -> None:
    held = {name: (one[COLUMNS].to_numpy(np.float32), one["ill"].to_numpy()) for name, one in LABELLED.items()}
    np.savez(tmp_path / "va.npz", x=held["north"][0])
    some = np.where(np.arange(60) < 9, held["north"][1], UNKNOWN)
    for place, said, known in (
        ((held["north"][0], None), "none", 0),
        (str(tmp_path / "va.npz"), None, 0),
        ((held["north"][0], some), "few", 9),
    ):
        data = {"name": "arrays", "sites": {**held, "va": place}, "site_labels": {"va": said}}
        domain = next(one for one in fedshift.check(study(data)).domains if one.name == "va")
        assert (domain.train, domain.measured_as_target, domain.without_label) == (0, known, 60 - known)
    rng = np.random.default_rng(0)
    for place in ("a/cat", "a/dog", "b/cat", "b/dog", "va", "vb/2024", "vc", "vc/dog"):
        (tmp_path / "images" / place).mkdir(parents=True, exist_ok=True)
        for number in range(10):
            pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / place / f"{number}.png")
    data = {"name": "image_folder", "root": str(tmp_path / "images"), "size": 8}
    labels = {"va": "none", "vb": "none", "vc": "few"}
    found = fedshift.check(study({**data, "site_labels": labels}))
    counts = {one.name: (one.measured_as_target, one.without_label) for one in found.domains}
    assert counts == {"a": (20, 0), "b": (20, 0), "va": (0, 10), "vb": (0, 10), "vc": (10, 10)}
    assert found.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("va", "labels", "said"),
    [
        (WITHOUT["va"], {}, r"no column 'ill'.*write data.site_labels: \{va: none\}"),
        (few(0), {}, r"no row has a label.*data.site_labels"),
        (few(0), {"va": "few"}, "no sample of 'va' has a label: write va: none"),
        (patients(9), {"va": "few"}, "every sample of 'va' has a label"),
        (few().replace({"ill": {1: 7}}), {"va": "few"}, "label '7' of site 'va' is none of the classes"),
        (WITHOUT["va"].drop(columns="a"), NONE, "no column 'a'"),
        (WITHOUT["va"], {"v": "none"}, "there is no site 'v'"),
        (WITHOUT["va"], dict.fromkeys(WITHOUT, "none"), "no site is left that has labels"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(va: pd.DataFrame, labels: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        fedshift.check(study(table({**LABELLED, "va": va}, site_labels=labels)))
    assert "\n" not in str(refused.value)


def test_methods_that_need_the_labels_are_refused_and_settings_stay() -> None:
    data = table(WITHOUT, site_labels=NONE)
    with pytest.raises(UserError, match="oracle trains on the target's labels, and 'va' lacks them"):
        fedshift.check(study(data, protocol=ADAPT, methods=["oracle"]))
    with pytest.raises(UserError, match="measures all sites, and 'va' lacks labels"):
        fedshift.check(study(data, protocol={"kind": "source_target", "splits": 1}, methods=["fedavg"]))
    settings = fedshift.api.parse(study(table(LABELLED))).dump()
    assert "site_labels" not in settings["data"]  # runs of before keep their identity


@pytest.mark.slow
def test_another_unit_leaves_no_estimate(tmp_path: Path) -> None:
    va = WITHOUT["va"].assign(a=30 * WITHOUT["va"]["a"] + 500)
    done = fedshift.run(study(table({**LABELLED, "va": va}, site_labels=NONE)), tmp_path)
    (estimate,) = done.estimates["va"]["fedavg"]
    assert estimate.abstain
    assert estimate.too_unlike
    assert "column 'a'" in estimate.reasons[0]
    shown = page(whole_report(done.collected))
    assert "We cannot say what to expect" in shown
    assert "What to do: do not use the model there until the data are mended" in shown


@pytest.mark.parametrize("codes", [("f", "m"), ("F", "M")])
def test_a_model_is_not_handed_out_where_it_adapted_to_what_is_too_unlike(
    codes: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Categories in another spelling: the column is named, and the adapted model needs a flag, the common one none."""

    def coded(frame: pd.DataFrame, names: tuple[str, str]) -> pd.DataFrame:
        return frame.assign(sex=[names[row % 2] for row in range(len(frame))])

    sites = {name: coded(frame, ("f", "m")) for name, frame in LABELLED.items()}
    sites["va"] = coded(patients(9, labels=False), codes)
    data = table(sites, site_labels=NONE, categorical=["sex"])
    protocol = {**ADAPT, "targets": ["va"]}
    done = fedshift.run(study(data, protocol=protocol, methods=["shot"], training={"rounds": 2}), tmp_path)
    (run,) = done.collected.unmeasured
    said, new = run.result.without_labels["va"], tmp_path / "new.csv"
    coded(patients(11, labels=False), ("f", "m")).to_csv(new, index=False)  # the data themselves are not the reason
    model = done.model(target="va")
    if codes == ("f", "m"):
        assert said.unlike is None
        predict(run.folder, new, format="csv")
        return
    assert "column 'sex': 100 % of the rows have an unknown category ('F', 'M'; known: 'f', 'm')" in said.unlike
    for refused in (
        lambda: predict(run.folder, new, format="csv"),
        lambda: export(run.folder, "safetensors", tmp_path / "out"),
        lambda: model.predict(new),
        lambda: model.predictions(new),
    ):
        with pytest.raises(UserError, match=r"adapted to 'va', and is not handed out.*column 'sex'.*--accept-shift"):
            refused()
    predict(run.folder, new, format="csv", accept_shift=True)
    assert len(capsys.readouterr().out.splitlines()) == 61
    export(run.folder, "safetensors", tmp_path / "out", accept_shift=True)
    common = fedshift.run(study(data, protocol={**PLAIN, "targets": ["va"]}), tmp_path / "common")
    predict(common.collected.unmeasured[0].folder, new, format="csv")


@pytest.mark.slow
def test_the_choice_of_a_model_looks_at_other_sites_alone(tmp_path: Path) -> None:
    data = table(WITHOUT, site_labels=NONE)
    done = fedshift.run(study(data, protocol=ADAPT, methods=["fedavg", "shot"], training={"rounds": 2}), tmp_path)
    found = done.choice("va")
    scores = {(run.method, run.target): run.accuracy() or 0.0 for run in done.runs}
    assert found.common == "fedavg"
    gains = [scores["shot", site] - scores["fedavg", site] for site in LABELLED]
    assert list(found.gains["shot"]) == pytest.approx(gains)
    assert len(done.choice("north").gains["shot"]) == 2  # of a measured target, too, without its own numbers
    said = f"At va the model of {found.method} should answer"
    assert said in page(whole_report(done.collected))
    assert said in done.markdown()
    assert done.verdict()["choices"][0]["method"] == found.method
    with pytest.raises(UserError, match="no finished run with target 'w'"):
        done.choice("w")


@pytest.mark.slow
def test_where_no_model_is_worth_more_than_the_most_frequent_class_none_answers(tmp_path: Path) -> None:
    """A poor start and very unequal classes: it must not lose to saying the same of every sample."""

    def unequal(seed: int) -> pd.DataFrame:
        return patients(seed).assign(ill=[0] * 51 + [1] * 9)

    data = table({**{name: unequal(seed) for seed, name in enumerate(LABELLED)}, "va": WITHOUT["va"]}, site_labels=NONE)
    poor = {"rounds": 1, "batch_size": 60, "lr": 1e-6}
    done = fedshift.run(study(data, protocol=ADAPT, methods=["fedavg", "shot"], training=poor), tmp_path)
    found = done.choice("va")
    runs = [run for run in done.runs if run.method == "fedavg"]
    always = [100 * site.support[0] / site.samples for run in runs for site in run.sites if site.part == "target"]
    gain = np.mean(always) - np.mean([run.accuracy() or 0.0 for run in runs])
    assert gain > 20
    assert (found.constant, found.method) == ("0", "fedavg")
    assert f"gains {gain:.1f} points" in found.why
    said = "At va no model should answer, but '0' for every sample"
    assert said in done.markdown()
    assert said.replace("'", "&#39;") in page(whole_report(done.collected))
    assert done.verdict()["choices"][0]["constant"] == "0"
