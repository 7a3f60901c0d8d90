"""adapt_to_one: what the target gives and is measured on, who takes part, wrong labels, and the same work for all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from calling import Cli
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from small import Stop, experiment, features, lines, outcome, process, processes_below, save, sites, wait_for, write

import fedshift
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.data.site_data import batches_per_epoch
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.config.sections import AdaptToOne, LeaveOneOut
from fedshift.experiment.plan import budgets, rounds_needed, site_budget, site_plans
from fedshift.experiment.protocol import Split, split_of, taking_part, with_wrong_labels
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.methods.base import Method
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.federated.oracle import Oracle
from fedshift.methods.pooled.source_only import SourceOnly
from fedshift.models import registry as models
from fedshift.weights import Weights

FOLDER = Manifest("", "", "", "", "")
METHODS: list[Any] = [
    "source_only",
    "fedavg",
    {"name": "kd3a", "gate_start": 0.5, "gate_end": 0.6},
    "oracle",
]
NETWORK: dict[str, Any] = {"name": "mlp", "hidden": [6], "batch_norm": True}


def data_of(**domains: Domain) -> DataSet:
    return DataSet("x", domains, ("0", "1", "2"), Preprocessing(kind="features"), FOLDER)


def domain(name: str, samples: int, groups: Any = None, **official: Any) -> Domain:
    inputs = np.random.default_rng(samples).normal(size=(samples, 2)).astype(np.float32)
    return Domain(name, inputs, np.arange(samples) % 3, groups, **official)


def adapting(where: dict[str, str], protocol: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The small experiment with a target that takes part."""
    kind = {"kind": "adapt_to_one", "targets": ["a"], "seeds": [0], "test_fraction": 0.3, **(protocol or {})}
    return experiment(where, protocol=kind, **{"methods": METHODS, "model": NETWORK, **changes})


def model_of(runs: Path, method: str, target: str = "a", seed: int = 0) -> Mapping[str, Any]:
    path = runs / "small" / method / target / f"seed-{seed}" / "model.safetensors"
    return {name: tensor.tobytes() for name, tensor in load_file(path).items()}


# Who gives what -------------------------------------------------------------------------------------------------------


def test_the_target_gives_its_training_part_and_is_measured_on_the_rest() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 60), c=domain("c", 45))
    protocol = AdaptToOne(test_fraction=0.2)
    split = split_of(protocol, data, "b", 0)
    assert set(split.train) == set(split.held_out) == {"a", "c"}
    assert set(split.unlabelled) == set(split.measured) == {"b"}
    given, measured = split.unlabelled["b"], split.measured["b"]
    assert len(measured) == 12
    assert sorted([*given, *measured]) == list(range(60))
    assert np.bincount(data.domains["b"].labels[measured]).tolist() == [4, 4, 4]
    for name in ("a", "c"):
        assert sorted([*split.train[name], *split.held_out[name]]) == list(range(len(data.domains[name])))
    # The same parts as when it is a source, so nothing is measured that another run trained on.
    other = split_of(protocol, data, "a", 0)
    assert np.array_equal(other.train["b"], given)
    assert np.array_equal(other.held_out["b"], measured)
    assert not np.array_equal(split_of(protocol, data, "b", 1).measured["b"], measured)
    unseen = split_of(LeaveOneOut(test_fraction=0.2), data, "b", 0)
    assert not unseen.unlabelled
    assert len(unseen.measured["b"]) == 60


def test_official_parts() -> None:
    train, test = np.array([5, 1, 0]), np.array([4, 3])
    known = domain("a", 6, train_rows=train, test_rows=test)
    data = data_of(a=known, b=domain("b", 9))
    split = split_of(AdaptToOne(), data, "a", 0)
    assert split.unlabelled["a"].tolist() == [0, 1, 5]
    assert split.measured["a"].tolist() == [3, 4]
    assert len(split.held_out["b"]) == 3  # drawn at random: the domain has no official parts
    random = AdaptToOne(split="random", test_fraction=0.4)
    drawn = [split_of(random, data, "a", seed).measured["a"].tolist() for seed in range(5)]
    assert any(rows != [3, 4] for rows in drawn)
    with pytest.raises(UserError, match=r"'b'.*official"):
        split_of(AdaptToOne(split="official"), data, "a", 0)


@pytest.mark.parametrize(("train", "test"), [([0, 1, 2], []), ([], [0, 1])])
def test_a_target_needs_both_parts(train: list[int], test: list[int]) -> None:
    parts = {"train_rows": np.array(train, np.int64), "test_rows": np.array(test, np.int64)}
    data = data_of(a=domain("a", 6, **parts), b=domain("b", 9))
    with pytest.raises(UserError, match=rf"'a' has {len(train)} samples to adapt to and {len(test)} to be measured on"):
        split_of(AdaptToOne(), data, "a", 0)


def test_no_base_image_on_both_sides() -> None:
    """Rotated digits: what is measured at the target was trained on by nobody, turned by no angle."""
    written = {"data": {"name": "rotated_digits", "per_class": 20}, "model": "mnist_cnn", "methods": ["fedavg"]}
    built = parse(written).data.build()

    def base(name: str, rows: Any) -> set[int]:
        groups = built.domains[name].groups
        assert groups is not None
        return set(groups[rows].tolist())

    for seed in range(3):
        split = split_of(AdaptToOne(test_fraction=0.2), built, "D30", seed)
        measured, given = base("D30", split.measured["D30"]), base("D30", split.unlabelled["D30"])
        assert len(measured) == 40
        assert not measured & given
        assert measured | given == set(range(200))
        for name, rows in split.train.items():
            assert base(name, rows) == given
            assert base(name, split.held_out[name]) == measured


# Whose sites ----------------------------------------------------------------------------------------------------------


def test_who_takes_part_in_which_role() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 21), c=domain("c", 9))
    split = split_of(AdaptToOne(), data, "b", 0)

    def roles(method: Method) -> list[tuple[str, str, list[tuple[str, int, int]], int]]:
        return [
            (
                plan.name,
                plan.role,
                [(part.name, len(rows), number) for part, rows, number in plan.parts],
                len(plan.unlabelled),
            )
            for plan in site_plans(method, data, split)
        ]

    a, b, c = len(split.train["a"]), len(split.unlabelled["b"]), len(split.train["c"])
    sites = [
        ("a", "source", [("a", a, 0)], 0),
        ("c", "source", [("c", c, 1)], 0),
        ("b", "target", [("b", b, 2)], 0),
    ]
    assert roles(KD3A()) == sites
    assert roles(FedAvg()) == sites  # who may talk to the target and does not
    assert roles(Oracle()) == [("b", "source", [("b", b, 0)], 0)]
    assert roles(SourceOnly()) == [("pool", "source", [("a", a, 0), ("c", c, 1)], 0)]


def test_no_step_reaches_a_label_of_the_target() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 20))
    method = KD3A()
    plans = site_plans(method, data, split_of(AdaptToOne(), data, "b", 0))
    setting = Setting(
        method, Training(batch_size=8), models.parse({"name": "linear"}), data.preprocessing, (2,), 3, 1, 0, "cpu"
    )
    where = LocalFederation(plans, setting, budget={"a": 9, "b": 9}, rounds=1)
    start = Weights(setting.build_network().state_dict())
    with pytest.raises(FedshiftError, match="unlabelled target for labels"):
        where.ask(method.fit, to=["b"], weights=start).only()
    for batch in where._runners["b"].site.all_batches():
        assert batch.labels is None


def test_labels_of_the_target_change_nothing_but_the_oracle(tmp_path: Path) -> None:
    """Groups make the parts independent of the labels, so that the target's can be replaced."""
    kept = {name: {**features(seed), "groups": np.arange(30)} for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    data = data_of(**{name: Domain(name, one["x"], one["y"], one["groups"]) for name, one in kept.items()})
    split = split_of(AdaptToOne(test_fraction=0.3), data, "a", 0)
    runs = {}
    for place in ("none", "given", "measured"):
        labels = kept["a"]["y"].copy()
        rows = {"none": [], "given": split.unlabelled["a"], "measured": split.measured["a"]}[place]
        labels[rows] = (labels[rows] + 1) % 3
        where = save(tmp_path / place, a={**kept["a"], "y": labels}, b=kept["b"], c=kept["c"])
        runs[place] = fedshift.run(adapting(where), tmp_path / place / "runs")
    for number, method in enumerate(("source_only", "fedavg", "kd3a", "oracle")):
        models_of = {place: model_of(tmp_path / place / "runs", method) for place in runs}
        accuracies = {place: found.runs[number].accuracy() for place, found in runs.items()}
        assert models_of["measured"] == models_of["none"]
        assert accuracies["measured"] != accuracies["none"]
        assert (models_of["given"] == models_of["none"]) == (method != "oracle")
        assert method == "oracle" or accuracies["given"] == accuracies["none"]


def test_a_target_that_takes_part_shares_in_the_encoding(tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1, shift=1000.0), b=features(2), c=features(3))
    options = adapting(where, data={"name": "arrays", "sites": where, "standardise": True}, methods=["kd3a"])
    fedshift.run(options, tmp_path / "runs")
    with safe_open(str(tmp_path / "runs/small/kd3a/a/seed-0/model.safetensors"), framework="pt") as file:
        metadata = json.loads(file.metadata()["fedshift"])
    assert min(metadata["preprocessing"]["mean"]) > 300
    assert metadata["adapted_to"] == "a"
    assert metadata["sources"] == ["b", "c"]
    assert "unseen" not in metadata


# drop and wrong_labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["c", ["c"]])
def test_a_dropped_domain_takes_no_part(tmp_path: Path, drop: Any) -> None:
    """The same bits as without its file."""
    where = sites(tmp_path)
    dropped = fedshift.run(adapting(where, {"drop": drop, "targets": "all"}), tmp_path / "runs")
    without = {name: path for name, path in where.items() if name != "c"}
    whole = fedshift.run(adapting(without, {"targets": "all"}), tmp_path / "other")
    assert {run.target for run in dropped.runs} == {"a", "b"}
    assert dropped.rows() == whole.rows()
    for run in dropped.runs:
        assert run.data["training_samples"].keys() == {"a", "b"} - {run.target}
        assert model_of(tmp_path / "runs", run.method, run.target) == model_of(
            tmp_path / "other", run.method, run.target
        )
    assert [one.name for one in fedshift.check(adapting(where, {"drop": drop})).domains] == ["a", "b"]


def test_wrong_labels_are_those_of_training_rows_of_the_named_source() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 90), c=domain("c", 45))
    before = {name: one.labels.copy() for name, one in data.domains.items()}
    protocol = AdaptToOne(wrong_labels={"b": 0.5, "a": 1.0})  # a is the target: it has no labels to make wrong
    split = split_of(protocol, data, "a", 0)
    shown = with_wrong_labels(protocol, data, split, 0)
    changed = np.flatnonzero(shown.domains["b"].labels != before["b"])
    assert len(changed) == round(len(split.train["b"]) / 2)
    assert set(changed) <= set(split.train["b"])
    assert shown.domains["a"] is data.domains["a"]
    assert shown.domains["c"] is data.domains["c"]
    assert shown.domains["b"].inputs is data.domains["b"].inputs
    for name, labels in before.items():  # what is measured is the data as they were
        assert np.array_equal(data.domains[name].labels, labels)
    again = with_wrong_labels(protocol, data, split, 0)
    assert np.array_equal(again.domains["b"].labels, shown.domains["b"].labels)
    other = with_wrong_labels(protocol, data, split, 1)
    assert not np.array_equal(other.domains["b"].labels, shown.domains["b"].labels)
    assert with_wrong_labels(AdaptToOne(), data, split, 0) is data
    assert with_wrong_labels(LeaveOneOut(), data, split, 0) is data


def test_a_source_with_wrong_labels_is_no_target() -> None:
    """Its turn as the target would be a run without a wrong label, averaged with the others."""
    data = data_of(a=domain("a", 30), b=domain("b", 90), c=domain("c", 45))
    for protocol in (AdaptToOne(wrong_labels={"b": 0.5}), AdaptToOne(wrong_labels={"b": 0.5}, targets=("a", "b"))):
        with pytest.raises(UserError, match=r"wrong_labels: 'b' is a target too.*targets: \[a"):
            taking_part(protocol, data)
    assert taking_part(AdaptToOne(wrong_labels={"b": 0.5}, targets=("a", "c")), data) is data
    assert list(taking_part(AdaptToOne(wrong_labels={"b": 0.5}, drop=("b",)), data).domains) == ["a", "c"]


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.9])
def test_a_target_with_one_sample_of_each_class(fraction: float) -> None:
    """A share of every class is nothing there: its samples are parted whatever their classes."""
    few = Domain("a", np.zeros((8, 3), np.float32), np.arange(8))
    data = data_of(a=few, b=domain("b", 90))
    split = split_of(AdaptToOne(test_fraction=fraction), data, "a", 0)
    assert len(split.measured["a"]) == round(8 * fraction)
    assert sorted([*split.measured["a"], *split.unlabelled["a"]]) == list(range(8))
    alone = data_of(a=Domain("a", few.inputs[:1], few.labels[:1]), b=domain("b", 90))
    with pytest.raises(UserError, match="'a' has 1 samples to adapt to and 0 to be measured on"):
        split_of(AdaptToOne(test_fraction=fraction), alone, "a", 0)


def test_the_released_rule_takes_the_next_class() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 90))
    protocol = AdaptToOne(wrong_labels={"b": 1.0}, wrong_labels_rule="shift")
    split = split_of(protocol, data, "a", 0)
    shown, rows = with_wrong_labels(protocol, data, split, 0).domains["b"].labels, split.train["b"]
    assert np.array_equal(shown[rows], (data.domains["b"].labels[rows] + 1) % 3)
    held_out = split.held_out["b"]
    assert np.array_equal(shown[held_out], data.domains["b"].labels[held_out])


def test_names_that_no_domain_has() -> None:
    data = data_of(north=domain("north", 30), south=domain("south", 90))
    for field in ({"drop": ("soth",)}, {"wrong_labels": {"soth": 0.1}}):
        with pytest.raises(
            UserError, match=rf"^protocol\.{next(iter(field))}: no domain is called 'soth'; did you mean 'south'\?"
        ):
            taking_part(AdaptToOne(**field), data)
    assert taking_part(AdaptToOne(), data) is data
    assert taking_part(LeaveOneOut(), data) is data
    # A malicious domain that is dropped does no harm: one experiment file serves both.
    both = AdaptToOne(drop=("south",), wrong_labels={"south": 0.5})
    assert list(taking_part(both, data).domains) == ["north"]


def test_what_is_measured_has_true_labels(tmp_path: Path) -> None:
    """Sources that all say the next class teach that, and neither the target nor a held-out part confirms it."""
    where = save(tmp_path, a=features(1, 90), b=features(2, 90), c=features(3, 90))
    training = {"rounds": 6, "batch_size": 8, "lr": 0.2, "momentum": 0.9}
    methods = ["fedavg", "source_only", "oracle"]
    true = fedshift.run(adapting(where, training=training, methods=methods), tmp_path / "true")
    wrong = {"wrong_labels": {"b": 1.0, "c": 1.0}, "wrong_labels_rule": "shift"}
    false = fedshift.run(adapting(where, wrong, training=training, methods=methods), tmp_path / "false")
    for one, other in zip(true.runs, false.runs, strict=True):
        if one.method == "oracle":  # it has the target's labels, which nobody touched
            assert model_of(tmp_path / "true", "oracle") == model_of(tmp_path / "false", "oracle")
            continue
        before, after = one.selected["last"], other.selected["last"]
        assert before is not None
        assert after is not None
        assert before.accuracy > 75 > 25 > after.accuracy, one.method
        assert before.source_accuracy is not None
        assert after.source_accuracy is not None
        assert before.source_accuracy > 75 > 25 > after.source_accuracy, one.method
    with pytest.raises(UserError, match=r"another experiment: protocol\.wrong_labels"):
        fedshift.run(adapting(where, training=training, methods=methods), tmp_path / "false")


@pytest.mark.slow
def test_wrong_labels_in_a_pool_of_processes(tmp_path: Path) -> None:
    """Each seed has its own wrong labels; a worker must not go on with those of the part before."""
    where = sites(tmp_path)
    protocol = {"targets": ["a", "b"], "seeds": [0, 1], "wrong_labels": {"c": 0.5}}
    options = adapting(where, protocol, methods=["kd3a", "source_only"])
    fedshift.run(options, tmp_path / "here")
    fedshift.run({**options, "engine": {"name": "local", "threads": 1, "workers": 2}}, tmp_path / "there")
    assert outcome(tmp_path / "there") == outcome(tmp_path / "here")
    fedshift.run(adapting(where, {**protocol, "wrong_labels": {}}, methods=["kd3a"]), tmp_path / "true")
    assert model_of(tmp_path / "true", "kd3a", "b", 1) != model_of(tmp_path / "here", "kd3a", "b", 1)


# Work -----------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 90), min_size=1),
    target=st.integers(1, 90),
    exchanges=st.sampled_from([0.2, 0.5, 1.0, 2.0, 10.0]),
    rounds=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    fixed=st.none() | st.integers(1, 60),
)
def test_equal_work(
    sizes: Mapping[str, int], target: int, exchanges: float, rounds: int, batch_size: int, fixed: int | None
) -> None:
    """The target's mini-batches count; and no site of a method is done before the others are."""
    split = Split({name: np.arange(size) for name, size in sizes.items()}, {}, {}, {"t": np.arange(target)})
    kd3a = KD3A(aggregations_per_epoch=exchanges)
    methods: list[Method] = [FedAvg(local_epochs=2), kd3a, SourceOnly(), Oracle(), CSAC(acquisition_epochs=2)]
    training = Training(rounds=rounds, batch_size=batch_size, mini_batches=fixed)
    every = {name: batches_per_epoch(size, batch_size) for name, size in {**sizes, "t": target}.items()}
    needs = [
        sum(method.mini_batches(every[name], rounds) for name in sizes) + method.target_mini_batches(every["t"], rounds)
        for method in methods
    ]
    total = fixed * len(sizes) if fixed else max(needs)
    data = data_of(**{name: domain(name, size) for name, size in {**sizes, "t": target}.items()})
    for method in methods:
        budget = budgets(method, methods, training, split)
        assert total <= sum(budget.values()) < total + len(every)
        allowed = site_budget(budget, site_plans(method, data, split))
        assert sum(allowed.values()) == sum(budget.values())
        needed = rounds_needed(method, training, split, budget)
        if method.pooled or method.supervised_target:
            assert len(allowed) == 1
            assert needed <= rounds
            continue
        assert (budget.get("t", 0) > 0) == method.needs_target
        assert set(allowed) == set(every)
        for name in every if method.needs_target else sizes:
            trained = method.target_mini_batches if name == "t" else method.mini_batches
            assert trained(every[name], max(needed, 1)) >= budget[name]
            if needed > 1:  # in the last round every site still has something to do
                assert trained(every[name], needed - 1) < budget[name]


def test_mini_batches_of_a_run(tmp_path: Path) -> None:
    """KD3A trains on three mini-batches a round at the target and each of two sources: the others get all nine."""
    found = fedshift.run(adapting(sites(tmp_path)), tmp_path / "runs")
    assert {run.method: (run.rounds, run.mini_batches) for run in found.runs} == {
        "source_only": (2, 9),
        "fedavg": (3, 9),
        "kd3a": (2, 9),
        "oracle": (2, 9),
    }


# From the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished experiment: the folder of runs, and its options."""
    folder = tmp_path_factory.mktemp("finished")
    where = save(folder, a=features(1, 60), b=features(2, 48), c=features(3, 66))
    options = adapting(where, {"targets": ["a", "b"], "seeds": [0, 1]})
    fedshift.run(options, folder / "runs")
    return folder / "runs", options


def test_check_foretells_the_run(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, options = finished
    file = write(tmp_path / "e.yaml", options)
    said = cli("check", file)
    assert said.code == 0, said.err
    for word in ("source_only", "fedavg", "kd3a", "oracle", "raw_data"):
        assert word in said.out, word
    foretold = fedshift.check(options)
    results = fedshift.run(options, runs)
    assert [(one.name, one.samples, one.train, one.held_out, one.measured_as_target) for one in foretold.domains] == [
        ("a", 60, 42, 18, 18),
        ("b", 48, 33, 15, 15),
        ("c", 66, 45, 21, 21),
    ]
    for method in foretold.methods:
        of = [run for run in results.runs if run.method == method.label]
        assert method.runs == len(of) == 4
        assert max(run.rounds for run in of) == method.rounds
        assert max(run.mini_batches for run in of) == method.mini_batches_per_site
        assert sum(sum(run.bytes_up.values()) for run in of) == method.bytes_up, method.label
        assert sum(sum(run.bytes_down.values()) for run in of) == method.bytes_down, method.label
        assert set(method.shares) >= set(of[0].bytes_up)


def test_run_and_table(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    runs, options = finished
    said = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")
    assert said.code == 0, said.err
    assert outcome(tmp_path / "runs") == outcome(runs)
    for select in ("last", "source", "oracle"):
        rows = json.loads(cli("table", runs, "--format", "json", "--select", select).out)
        assert [(row["method"], row["target"]) for row in rows] == [
            (method, target)
            for method in ("source_only", "fedavg", "kd3a", "oracle")
            for target in ("a", "b", "average")
        ]
        for row in rows:
            assert row["n"] == 2
            assert 0 <= row["mean"] <= 100
    assert "kd3a" in cli("table", runs).out


def test_what_a_run_writes_down(finished: tuple[Path, dict[str, Any]]) -> None:
    runs, _ = finished
    part = runs / "small" / "kd3a" / "b" / "seed-1"
    result = json.loads((part / "result.json").read_text())
    assert result["data"]["measured_samples"] == {"b": 15}
    assert result["data"]["training_samples"] == {"a": 42, "c": 45}
    assert result["data"]["held_out_samples"] == {"a": 18, "c": 21}
    for line in (part / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert set(record["losses"]) == set(record["aggregation_weights"]) == {"a", "b", "c"}
        assert sum(record["aggregation_weights"].values()) == pytest.approx(1)
        assert 0 <= record["extra"]["confident"] <= 1
        assert set(record["target_accuracy"]) == {"b"}
        assert set(record["source_accuracy"]) == {"a", "c"}


def test_a_model_file_predicts(cli: Cli, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """On what was measured of the target the predictions have the accuracy that the run reports."""
    runs, options = finished
    arrays = np.load(options["data"]["sites"]["b"])
    split = split_of(parse(options).protocol, parse(options).data.build(), "b", 0)
    rows = split.measured["b"]
    np.savez(tmp_path / "measured.npz", x=arrays["x"][rows])
    for method in ("source_only", "fedavg", "kd3a", "oracle"):
        part = runs / "small" / method / "b" / "seed-0"
        reported = json.loads((part / "result.json").read_text())["selected"]["last"]["accuracy"]
        said = json.loads(cli("predict", part, tmp_path / "measured.npz", "--format", "json").out)
        right = [one["predicted"] == str(label) for one, label in zip(said, arrays["y"][rows], strict=True)]
        assert 100 * fmean(right) == pytest.approx(reported), method


def test_a_dumped_experiment_is_the_experiment(tmp_path: Path) -> None:
    protocol = {"drop": "c", "wrong_labels": {"b": 0.25}, "wrong_labels_rule": "shift", "targets": "a", "seeds": 3}
    resolved = parse(adapting(sites(tmp_path), protocol))
    assert isinstance(resolved.protocol, AdaptToOne)
    assert (resolved.protocol.drop, resolved.protocol.targets, resolved.protocol.seeds) == (("c",), ("a",), (3,))
    assert parse(json.loads(json.dumps(resolved.dump()))) == resolved


MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("nothing to measure", {"test_fraction": 0}, ["protocol.test_fraction", "greater than 0"]),
    ("nothing to adapt to", {"test_fraction": 1}, ["protocol.test_fraction", "less than 1"]),
    ("too little to measure", {"test_fraction": 0.001}, ["'a'", "0 to be measured on", "protocol.test_fraction"]),
    ("kind", {"kind": "adapt_to_on"}, ["protocol.kind", "'adapt_to_on'", "did you mean 'adapt_to_one'?"]),
    ("another kind", {"kind": "leave_out"}, ["protocol.kind", "did you mean 'leave_one_out'?"]),
    ("a kind that is no name", {"kind": ["adapt_to_one"]}, ["protocol.kind"]),
    ("no kind", {"kind": None}, ["protocol.kind", "adapt_to_one, leave_one_out"]),
    ("field of the other kind", {"base_images": "shared"}, ["protocol.base_images", "there is no such field"]),
    ("field", {"wrong_label": {"b": 0.1}}, ["protocol.wrong_label", "did you mean 'wrong_labels'?"]),
    ("target", {"targets": ["aa"]}, ["protocol.targets", "'aa'", "did you mean 'a'?"]),
    ("dropped", {"drop": ["bb"]}, ["protocol.drop", "'bb'", "did you mean 'b'?"]),
    ("a dropped target", {"drop": ["a"]}, ["protocol.targets", "'a'"]),
    ("all dropped", {"drop": ["b", "c"]}, ["adapt_to_one needs at least 2 domains"]),
    ("malicious", {"wrong_labels": {"bb": 0.5}}, ["protocol.wrong_labels", "'bb'", "did you mean 'b'?"]),
    ("share of wrong labels", {"wrong_labels": {"b": 1.5}}, ["protocol.wrong_labels", "1.5"]),
    ("wrong labels of the wrong kind", {"wrong_labels": ["b"]}, ["protocol.wrong_labels"]),
    ("rule", {"wrong_labels_rule": "shfit"}, ["protocol.wrong_labels_rule", "shift", "shfit"]),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_one_line(cli: Cli, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = write(tmp_path / "e.yaml", adapting(sites(tmp_path / "data"), changes))
    for command in (("run", file, "--runs", tmp_path / "runs"), ("check", file)):
        line = cli(*command).error()
        for word in words:
            assert word in line, (command[0], line)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("method", "network", "words"),
    [
        ({"name": "kd3a", "focus": "h_divergence"}, "linear", ["kd3a.focus", "h_divergence", "BatchNorm"]),
        ({"name": "kd3a", "batch_norm": "loss"}, "linear", ["kd3a.batch_norm", "loss", "BatchNorm"]),
        ({"name": "kd3a", "gate_start": 1}, NETWORK, ["methods[0] (kd3a).gate_start", "less than 1"]),
        ({"name": "kd3a", "gates": 1}, NETWORK, ["methods[0] (kd3a).gates", "'gate_"]),
    ],
)
def test_a_method_that_does_not_fit(
    cli: Cli, tmp_path: Path, method: dict[str, Any], network: Any, words: list[str]
) -> None:
    file = write(tmp_path / "e.yaml", adapting(sites(tmp_path / "data"), methods=[method], model=network))
    for command in (("run", file, "--runs", tmp_path / "runs"), ("check", file)):
        line = cli(*command).error()
        assert all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["kd3a", "oracle"])
def test_methods_that_need_a_target(cli: Cli, tmp_path: Path, method: str) -> None:
    options = adapting(sites(tmp_path / "data"), methods=["fedavg", method])
    del options["protocol"]
    file = write(tmp_path / "e.yaml", options)
    line = cli("check", file).error()
    assert line.startswith(f"error: methods: {method} adapts to a target")
    assert "kind: adapt_to_one" in line
    assert cli("check", file, "protocol.kind=adapt_to_one").code == 0


# Interruptions --------------------------------------------------------------------------------------------------------

REMEMBERING: dict[str, Any] = {
    "name": "kd3a",
    "gate_start": 0.5,
    "gate_end": 0.6,
    "private_classifier": True,
    "batch_norm": "off",
    "share_momentum": 0.5,
}
"""As much as KD3A can remember: heads, statistics, shares of the round before, and momentum."""


def remembering(where: dict[str, str]) -> dict[str, Any]:
    training = {"rounds": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "reset_optimizer_each_round": False}
    return adapting(where, {"wrong_labels": {"c": 0.2}}, methods=[REMEMBERING], training=training)


def test_a_kill_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at the n-th renaming of a file, for every n, and once more in the resumed run."""
    options = remembering(sites(tmp_path))
    fedshift.run(options, tmp_path / "whole")
    wanted = outcome(tmp_path / "whole")
    original, calls = os.replace, 0

    def killed(*arguments: Any) -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Stop
        original(*arguments)

    monkeypatch.setattr(os, "replace", killed)
    runs = tmp_path / "runs"
    for moment in range(1, 100):
        shutil.rmtree(runs, ignore_errors=True)
        calls = moment
        try:
            fedshift.run(options, runs)
        except Stop:
            calls = 4
            try:
                fedshift.run(options, runs)
            except Stop:
                calls = 0
                fedshift.run(options, runs)
            assert outcome(runs) == wanted, moment
        else:
            break
    assert moment > 6
    assert outcome(runs) == wanted


@pytest.mark.slow
def test_kill_9_with_workers(tmp_path: Path) -> None:
    """Workers end with the process they work for; the run goes on without them to the same bits."""
    options = remembering(sites(tmp_path))
    fedshift.run(options, tmp_path / "whole")
    pooled = {**options, "engine": {"name": "local", "threads": 1, "workers": 2}}
    runs, mark = tmp_path / "runs", str(tmp_path / "mark")
    running = process(pooled, runs, mark, seconds=0.2)
    wait_for(lambda: lines(runs / "small" / "kd3a" / "a" / "seed-0" / "rounds.jsonl") >= 1, 120)
    running.kill()
    running.join()
    wait_for(lambda: not processes_below(mark), 20)
    assert not (runs / "small" / "kd3a" / "a" / "seed-0" / "result.json").exists()
    fedshift.run(options, runs)
    assert outcome(runs) == outcome(tmp_path / "whole")
