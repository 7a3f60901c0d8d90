"""source_target: who gives and is measured on what, pairs and splits, rows, gains, distances, resume, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import adapting
import numpy as np
import pytest
from calling import Cli
from safetensors import safe_open
from small import Stop, StopAfter, experiment, features, outcome, save, sites, write

import fedshift
from fedshift.data.domain import DataSet, Domain
from fedshift.errors import UserError
from fedshift.evaluation.metrics import harmonic_mean
from fedshift.experiment.config.engine_section import LocalEngine
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.distance import proxy_distances
from fedshift.experiment.plan import Plan, site_plans
from fedshift.experiment.protocols.source_target import SourceTarget
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.methods.base import Method
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.mdfnet import MDFNet
from fedshift.methods.pooled.cdan import CDAN
from fedshift.methods.pooled.source_only import SourceOnly
from fedshift.models import registry as models

NETWORK: dict[str, Any] = {"name": "mlp", "hidden": [6]}
METHODS: list[Any] = ["source_only", "alone", "fedavg", "mdfnet", "cdan", "srdc"]


def data_of(**samples: int) -> DataSet:
    return adapting.data_of(**{name: adapting.domain(name, number) for name, number in samples.items()})


def pairs(where: dict[str, str], protocol: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    kind = {"kind": "source_target", "pairs": [["a", "b"], ["c", "a"]], "splits": 2, **(protocol or {})}
    return experiment(where, protocol=kind, **{"methods": METHODS, "model": NETWORK, **changes})


# Who gives what -------------------------------------------------------------------------------------------------------


def test_pairs_and_who_gives_what() -> None:
    data = data_of(a=30, b=24, c=33)
    protocol = SourceTarget(pairs=[["a", "b"], [["a", "c"], "b"]])
    assert protocol.targets_of(data) == ("a-b", "a+c-b")
    split = protocol.split_of(data, "a-b", 0)
    assert {name: len(rows) for name, rows in split.train.items()} == {"a": 15}
    assert sorted([*split.train["a"], *split.held_out["a"]]) == list(range(30))
    assert np.bincount(data.domains["a"].labels[split.held_out["a"]]).tolist() == [5, 5, 5]
    for rows in (split.unlabelled, split.measured):
        assert rows.keys() == {"b"}
        assert rows["b"].tolist() == list(range(24))
    again = protocol.split_of(data, "a+c-b", 0)
    assert set(again.train) == {"a", "c"}
    assert np.array_equal(again.train["a"], split.train["a"])  # a site's parts do not depend on the others
    assert not np.array_equal(protocol.split_of(data, "a-b", 1).train["a"], split.train["a"])
    fewer = SourceTarget(labelled_test_fraction=0.7).split_of(data, "a-b", 0)  # the 3:7 split
    assert len(fewer.train["a"]) == 9
    data = data_of(a=30, b=24, c=33)
    protocol = SourceTarget(splits=4)
    assert protocol.targets_of(data) == ("a-b", "a-c", "b-a", "b-c", "c-a", "c-b")
    assert protocol.seeds == (0, 1, 2, 3)
    whole = parse(pairs({"a": "a.npz", "b": "b.npz", "c": "c.npz"}, {"pairs": "all"}))
    assert len(Plan(whole, data).runs) == 6 * 2 * len(METHODS)
    assert parse(whole.dump()) == whole
    named = parse(pairs({"a": "a.npz"}, {"pairs": [["a", "b"], [["a", "c"], ["b"]]]}))
    assert parse(named.dump()) == named
    data = data_of(**{"a": 9, "b-c": 9, "a-b": 9, "c": 9})
    with pytest.raises(UserError, match=r"'a-b-c' .*rename a site"):
        SourceTarget(pairs=[["a", "b-c"], ["a-b", "c"]]).targets_of(data)


def test_whose_sites() -> None:
    data = data_of(a=30, b=24, c=33, d=12)
    protocol = SourceTarget(pairs=[[["c", "a"], ["d", "b"]]])
    assert protocol.roles_of(data, "c+a-d+b") == (("a", "c"), ("b", "d"))
    split = protocol.split_of(data, "c+a-d+b", 0)

    def roles(method: Method) -> list[tuple[str, str, int, int]]:
        plans = site_plans(method, data, split)
        return [
            (plan.name, plan.role, sum(len(rows) for _, rows, _ in plan.parts), len(plan.unlabelled)) for plan in plans
        ]

    several = [("a", "source", 15, 0), ("c", "source", 16, 0), ("b", "target", 24, 0), ("d", "target", 12, 0)]
    assert [(name, role) for name, role, *_ in roles(MDFNet())] == [(name, role) for name, role, *_ in several]
    assert roles(MDFNet())[2:] == several[2:]
    assert roles(CDAN())[0][0] == "pool"
    assert roles(CDAN())[0][3] == 2
    assert roles(SourceOnly())[0][3] == 0


def test_a_site_of_another_pair_has_no_say_in_the_encoding(tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1), b=features(2), c=features(3, shift=1000.0))
    data = {"name": "arrays", "sites": where, "standardise": True}
    fedshift.run(pairs(where, {"pairs": [["a", "b"]], "splits": 1}, data=data, methods=["mdfnet"]), tmp_path / "runs")
    with safe_open(str(tmp_path / "runs/small/mdfnet/a-b/seed-0/model.safetensors"), framework="pt") as file:
        metadata = json.loads(file.metadata()["fedshift"])
    assert max(metadata["preprocessing"]["mean"]) < 5
    assert metadata["sources"] == ["a"]
    assert metadata["adapted_to"] == "b"


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedshift.api.Results:
    folder = tmp_path_factory.mktemp("pairs")
    return fedshift.run(pairs(sites(folder)), folder / "runs")


def test_rows_hold_every_number_of_a_pair(whole: fedshift.api.Results) -> None:
    rows = whole.rows()
    assert len(rows) == len(METHODS) * 3
    by_place = {(row["method"], row["labelled"], row["unlabelled"]): row for row in rows}
    for method in ("mdfnet", "srdc"):
        found = []
        for labelled, unlabelled in (("a", "b"), ("c", "a")):
            runs = [run for run in whole.runs if (run.method, run.target) == (method, f"{labelled}-{unlabelled}")]
            assert [run.seed for run in runs] == [0, 1]
            row = by_place[method, labelled, unlabelled]
            each = [harmonic_mean(run.source_accuracy() or 0, run.accuracy() or 0) for run in runs]
            assert row["n"] == 2
            assert row["seeds"] == pytest.approx(each)
            assert row["harmonic_mean"] == row["mean"] == pytest.approx(fmean(each))
            assert row["accuracy_source"] == pytest.approx(fmean(run.source_accuracy() or 0 for run in runs))
            assert row["accuracy_target"] == pytest.approx(fmean(run.accuracy() or 0 for run in runs))
            found.append(row)
        average = by_place[method, "average", "average"]
        assert average["harmonic_mean"] == pytest.approx(fmean(row["harmonic_mean"] for row in found))
        for field in ("accuracy_source", "accuracy_target", "proxy_a_distance"):
            assert average[field] == pytest.approx(fmean(row[field] for row in found))
        other = harmonic_mean(average["accuracy_source"], average["accuracy_target"])
        assert average["harmonic_mean_of_averages"] == pytest.approx(other)
    # At a labelled site over its own model, at an unlabelled one over a guess among three classes.
    results = {(run.method, run.target, run.seed): run for run in whole.runs}
    for row in whole.rows():
        if row["labelled"] == "average":
            assert set(row["gain"]) == {"labelled", "unlabelled"}
            continue
        a, b = row["labelled"], row["unlabelled"]
        own = [results[row["method"], row["target"], seed].selected["last"] for seed in (0, 1)]
        alone = [results["alone", row["target"], seed].selected["last"] for seed in (0, 1)]
        assert all(own)
        assert all(alone)
        gains = [mine.sites[a] - theirs.sites[a] for mine, theirs in zip(own, alone, strict=True)]  # type: ignore[union-attr]
        assert row["gain"][a] == pytest.approx(fmean(gains))
        assert row["gain"][b] == pytest.approx(row["accuracy_target"] - 100 / 3)
        if row["method"] == "alone":
            assert row["gain"][a] == 0


@pytest.mark.slow
def test_each_site_that_trained_alone_answers_for_itself(tmp_path: Path) -> None:
    """Opposite labels at two labelled sites: a common model fails at one of them, each site's own does not."""
    one, two = features(1, 60), features(2, 60)
    two["y"] = (two["y"] + 1) % 3
    where = save(tmp_path, a=one, b=two, c=features(3))
    options = pairs(where, {"pairs": [[["a", "b"], "c"]], "splits": 1}, methods=["alone", "source_only"])
    options["training"] = {"rounds": 30, "batch_size": 8, "lr": 0.1, "momentum": 0.9}
    rows = {row["method"]: row for row in fedshift.run(options, tmp_path / "runs").rows()}
    assert rows["alone"]["accuracy_source"] > rows["source_only"]["accuracy_source"] + 20
    assert rows["alone"]["labelled"] in ("a+b", "average")


def test_every_way_to_write_the_table_and_the_page(whole: fedshift.api.Results, cli: Cli) -> None:
    text = whole.markdown()
    for title in (
        "Harmonic mean of both",
        "Accuracy at the labelled",
        "Accuracy at the unlabelled",
        "Win-win gain",
        "Proxy A",
    ):
        assert title in text
    assert text.count("| method |") == 5
    assert "n = 2 splits" in text
    for format in ("terminal", "markdown", "latex", "json"):
        assert cli("table", str(whole.folder), "--format", format).code == 0
    assert len(json.loads(cli("table", str(whole.folder), "--format", "json").out)) == len(METHODS) * 3
    assert "source" in cli("table", str(whole.folder), "--select", "source").out
    from fedshift.report.page import page
    from fedshift.report.report import whole_report

    text = page(whole_report(whole.collected))
    assert "Does everybody win?" in text
    assert text.count("Win-win gain of the labelled sites") >= 1


# The distance ---------------------------------------------------------------------------------------------------------


def test_proxy_distance_of_like_and_unlike_sites() -> None:
    rng = np.random.default_rng(0)
    made = {}
    for name, shift in {"here": 0.0, "twin": 0.0, "far": 6.0}.items():
        inputs = (rng.normal(size=(300, 4)) + np.array([shift, 0, 0, 0])).astype(np.float32)
        made[name] = Domain(name, inputs, np.arange(300) % 3)
    data = adapting.data_of(**made)
    protocol = SourceTarget(pairs=[["here", ["twin", "far"]]])
    split = protocol.split_of(data, "here-twin+far", 0)
    linear = models.parse({"name": "linear"})
    setting = Setting(FedAvg(), Training(), linear, data.preprocessing, data.input_shape, 3, 1, 0, "cpu")
    found = proxy_distances(data, split, setting, LocalEngine())
    assert set(found) == {"here-twin", "here-far"}
    assert found["here-twin"] < 0.4
    assert found["here-far"] > 1.9
    assert found == proxy_distances(data, split, setting, LocalEngine())
    # By a library, on the same kind of halves.
    from sklearn.linear_model import LogisticRegression

    x = np.concatenate([made["here"].inputs, made["far"].inputs])  # type: ignore[arg-type]
    side = np.repeat([0, 1], 300)
    error = 1 - LogisticRegression().fit(x[::2], side[::2]).score(x[1::2], side[1::2])
    assert found["here-far"] == pytest.approx(2 * (1 - 2 * error), abs=0.1)
    for kind in ("weights", "numbers"):
        assert proxy_distances(data, split, setting, LocalEngine(refuse=(kind,))) == {}
        alone = proxy_distances(data, split, setting, LocalEngine(refuse_at={"far": (kind,)}))
        assert alone == {"here-twin": found["here-twin"]}, "the others are measured all the same"


# Going on, and the same for all ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    where = sites(tmp_path)
    methods = ["source_only", "mdfnet"]
    options = pairs(where, {"splits": 1, "pairs": [["a", "b"]]}, methods=methods)
    fedshift.run(options, tmp_path / "whole")
    for rounds in (1, 2):  # in the middle of the first run, then of the second
        with pytest.raises(Stop):
            fedshift.run(options, tmp_path / "cut", StopAfter(rounds))
    fedshift.run(options, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    # More pairs and splits can be added to it.
    more = fedshift.run(pairs(where, methods=methods), tmp_path / "cut")
    assert len(more.runs) == len(methods) * 4


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_workers_change_nothing(tmp_path: Path) -> None:
    options = pairs(sites(tmp_path), {"splits": 1, "pairs": [["a", ["b", "c"]]]}, methods=["mdfnet", "alone"])
    one = fedshift.run(options, tmp_path / "one")
    fedshift.run({**options, "engine": {"threads": 1, "workers": 2}}, tmp_path / "two")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert {len(run.unlabelled) for run in one.runs} == {2}


def test_check_says_what_will_be_measured(whole: fedshift.api.Results, tmp_path: Path, cli: Cli) -> None:
    found = fedshift.check(pairs(sites(tmp_path)))
    by_name = {domain.name: domain for domain in found.domains}
    assert (by_name["a"].train, by_name["a"].held_out, by_name["a"].measured_as_target) == (15, 15, 30)
    assert (by_name["b"].train, by_name["b"].measured_as_target) == (0, 24)
    mdfnet = next(method for method in found.methods if method.label == "mdfnet")
    own = [run for run in whole.runs if run.method == "mdfnet"]
    assert mdfnet.bytes_up == sum(sum(run.bytes_up.values()) for run in own)
    assert mdfnet.bytes_down == sum(sum(run.bytes_down.values()) for run in own)
    assert cli("check", str(write(tmp_path / "e.json", pairs(sites(tmp_path))))).code == 0


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ({"pairs": [["a", []]]}, r"protocol\.pairs: a pair has no unlabelled site"),
        ({"pairs": [[[], "b"]]}, r"protocol\.pairs: a pair has no labelled site"),
        ({"pairs": ["a"]}, r"protocol\.pairs: a pair is \[labelled, unlabelled\]"),
        ({"pairs": [["a", "b", "c"]]}, r"protocol\.pairs: a pair is \[labelled, unlabelled\]"),
        ({"pairs": [["a", "a"]]}, r"protocol\.pairs: site 'a' .*twice"),
        ({"pairs": []}, r"protocol\.pairs"),
        ({"pairs": [["a", "bb"]]}, r"protocol\.pairs: no domain is called 'bb'; did you mean 'b'"),
        ({"pairs": [["a", "b"], ["a", "b"]]}, r"protocol\.pairs: 'a-b' .*twice"),
        ({"splits": 0}, r"protocol\.splits"),
        ({"labelled_test_fraction": 1}, r"protocol\.labelled_test_fraction"),
        ({"targets": ["a"]}, r"protocol\.targets: there is no such field"),
    ],
)
def test_pairs_that_cannot_be(tmp_path: Path, protocol: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        fedshift.run(pairs(sites(tmp_path), protocol), tmp_path / "runs")
    assert "\n" not in str(error.value)


def test_a_labelled_site_with_one_sample(tmp_path: Path, cli: Cli) -> None:
    where = save(tmp_path, a=features(1, 1), b=features(2), c=features(3))
    done = cli("run", str(write(tmp_path / "e.json", pairs(where))))
    assert done.code == 2
    assert "labelled site 'a' has 1 sample(s), 1 to train on and 0 to be measured on" in done.err
    # Without labels one sample is enough.
    found = fedshift.run(pairs(where, {"pairs": [["b", "a"]], "splits": 1}), tmp_path / "runs")
    assert {run.data["unlabelled_samples"]["a"] for run in found.runs} == {1}


@pytest.mark.parametrize("method", ["kd3a", "shot", "fada", "oracle"])
def test_methods_for_one_target_say_so(tmp_path: Path, method: str) -> None:
    with pytest.raises(UserError, match=f"methods: {method} adapts to one target"):
        parse(pairs(sites(tmp_path), {"pairs": [["a", ["b", "c"]]]}, methods=[method]))


@pytest.mark.parametrize("method", ["kd3a", "shot", "oracle"])
def test_methods_for_one_target_run_on_pairs(tmp_path: Path, method: str) -> None:
    found = fedshift.run(pairs(sites(tmp_path), {"splits": 1}, methods=[method]), tmp_path / "runs")
    assert len(found.rows()) == 3
