"""adapt_to_one: what the target gives and is measured on, who takes part, and the same work for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapting import adapting, data_of, domain, model_of
from safetensors import safe_open
from small import features, save, sites

import fedshift
from fedshift.data.domain import Domain
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import site_plans
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.methods.base import Method
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.federated.oracle import Oracle
from fedshift.methods.pooled.source_only import SourceOnly
from fedshift.models import registry as models
from fedshift.weights import Weights

# Who gives what -------------------------------------------------------------------------------------------------------


def test_the_target_gives_its_training_part_and_is_measured_on_the_rest() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 60), c=domain("c", 45))
    protocol = AdaptToOne(test_fraction=0.2)
    split = protocol.split_of(data, "b", 0)
    assert set(split.train) == set(split.held_out) == {"a", "c"}
    assert set(split.unlabelled) == set(split.measured) == {"b"}
    given, measured = split.unlabelled["b"], split.measured["b"]
    assert len(measured) == 12
    assert sorted([*given, *measured]) == list(range(60))
    assert np.bincount(data.domains["b"].labels[measured]).tolist() == [4, 4, 4]
    for name in ("a", "c"):
        assert sorted([*split.train[name], *split.held_out[name]]) == list(range(len(data.domains[name])))
    # The same parts as when it is a source, so nothing is measured that another run trained on.
    other = protocol.split_of(data, "a", 0)
    assert np.array_equal(other.train["b"], given)
    assert np.array_equal(other.held_out["b"], measured)
    assert not np.array_equal(protocol.split_of(data, "b", 1).measured["b"], measured)
    unseen = LeaveOneOut(test_fraction=0.2).split_of(data, "b", 0)
    assert not unseen.unlabelled
    assert len(unseen.measured["b"]) == 60
    train, test = np.array([5, 1, 0]), np.array([4, 3])
    known = domain("a", 6, train_rows=train, test_rows=test)
    data = data_of(a=known, b=domain("b", 9))
    split = AdaptToOne().split_of(data, "a", 0)
    assert split.unlabelled["a"].tolist() == [0, 1, 5]
    assert split.measured["a"].tolist() == [3, 4]
    assert len(split.held_out["b"]) == 3  # drawn at random: the domain has no official parts
    random = AdaptToOne(split="random", test_fraction=0.4)
    drawn = [random.split_of(data, "a", seed).measured["a"].tolist() for seed in range(5)]
    assert any(rows != [3, 4] for rows in drawn)
    with pytest.raises(UserError, match=r"'b'.*official"):
        AdaptToOne(split="official").split_of(data, "a", 0)


@pytest.mark.parametrize(("train", "test"), [([0, 1, 2], []), ([], [0, 1])])
def test_a_target_needs_both_parts(train: list[int], test: list[int]) -> None:
    parts = {"train_rows": np.array(train, np.int64), "test_rows": np.array(test, np.int64)}
    data = data_of(a=domain("a", 6, **parts), b=domain("b", 9))
    with pytest.raises(UserError, match=rf"'a' has {len(train)} samples to adapt to and {len(test)} to be measured on"):
        AdaptToOne().split_of(data, "a", 0)


def test_no_base_image_on_both_sides() -> None:
    """Rotated digits: what is measured at the target was trained on by nobody, turned by no angle."""
    written = {"data": {"name": "rotated_digits", "per_class": 20}, "model": "mnist_cnn", "methods": ["fedavg"]}
    built = parse(written).data.build()

    def base(name: str, rows: Any) -> set[int]:
        groups = built.domains[name].groups
        assert groups is not None
        return set(groups[rows].tolist())

    for seed in range(3):
        split = AdaptToOne(test_fraction=0.2).split_of(built, "D30", seed)
        measured, given = base("D30", split.measured["D30"]), base("D30", split.unlabelled["D30"])
        assert len(measured) == 40
        assert not measured & given
        assert measured | given == set(range(200))
        for name, rows in split.train.items():
            assert base(name, rows) == given
            assert base(name, split.held_out[name]) == measured


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.9])
def test_a_target_with_one_sample_of_each_class(fraction: float) -> None:
    """A share of every class is nothing there: its samples are parted whatever their classes."""
    few = Domain("a", np.zeros((8, 3), np.float32), np.arange(8))
    data = data_of(a=few, b=domain("b", 90))
    split = AdaptToOne(test_fraction=fraction).split_of(data, "a", 0)
    assert len(split.measured["a"]) == round(8 * fraction)
    assert sorted([*split.measured["a"], *split.unlabelled["a"]]) == list(range(8))
    alone = data_of(a=Domain("a", few.inputs[:1], few.labels[:1]), b=domain("b", 90))
    with pytest.raises(UserError, match="'a' has 1 samples to adapt to and 0 to be measured on"):
        AdaptToOne(test_fraction=fraction).split_of(alone, "a", 0)


# Whose sites ----------------------------------------------------------------------------------------------------------


def test_who_takes_part_in_which_role() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 21), c=domain("c", 9))
    split = AdaptToOne().split_of(data, "b", 0)

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
    plans = site_plans(method, data, AdaptToOne().split_of(data, "b", 0))
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
    split = AdaptToOne(test_fraction=0.3).split_of(data, "a", 0)
    runs = {}
    for place in ("none", "given", "measured"):
        labels = kept["a"]["y"].copy()
        rows = {"none": [], "given": split.unlabelled["a"], "measured": split.measured["a"]}[place]
        labels[rows] = (labels[rows] + 1) % 3
        where = save(tmp_path / place, a={**kept["a"], "y": labels}, b=kept["b"], c=kept["c"])
        runs[place] = fedshift.run(adapting(where), tmp_path / place / "runs")
    for number, method in enumerate(("source_only", "fedavg", "kd3a", "oracle")):
        models_of = {run: model_of(tmp_path / run / "runs", method) for run in runs}
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


# Work -----------------------------------------------------------------------------------------------------------------


def test_mini_batches_of_a_run(tmp_path: Path) -> None:
    """KD3A trains on three mini-batches a round at the target and each of two sources: the others get all nine."""
    found = fedshift.run(adapting(sites(tmp_path)), tmp_path / "runs")
    assert {run.method: (run.rounds, run.mini_batches) for run in found.runs} == {
        "source_only": (2, 9),
        "fedavg": (3, 9),
        "kd3a": (2, 9),
        "oracle": (2, 9),
    }
