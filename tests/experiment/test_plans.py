"""From a split to sites: who is handed which rows, labels and settings, by a hand count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import experiment, sites

import fedshift
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.experiment.budgets import budgets, site_budget
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import POOL, Plan, pooled_bytes, site_plans
from fedshift.experiment.protocols.base import Split
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.experiment.runs import round_loop
from fedshift.methods import registry
from fedshift.methods.base import Method

SPLIT = Split(
    {"a": np.arange(6), "b": np.array([0, 2])}, {"a": np.array([6, 7])}, {"t": np.arange(3)}, {"t": np.array([4, 5, 6])}
)


def data() -> DataSet:
    found = {name: Domain(name, np.zeros((9, 5), np.float32), np.arange(9) % 3) for name in ("b", "a", "t")}
    return DataSet("x", found, ("0", "1", "2"), Preprocessing(kind="features"), Manifest(*[""] * 5))


def named(name: str) -> Method:
    return registry.parse({"name": name})


def rows_of(parts: Any) -> dict[str, list[int]]:
    return {domain.name: rows.tolist() for domain, rows, _ in parts}


def test_who_is_handed_what() -> None:
    # DeepAll pools sources; MDAN the target's unlabelled part as well.
    (plain,), (adapting,) = (site_plans(named(name), data(), SPLIT) for name in ("deepall", "mdan"))
    assert rows_of(plain.parts) == rows_of(adapting.parts) == {"b": [0, 2], "a": [0, 1, 2, 3, 4, 5]}
    assert rows_of(plain.unlabelled) == {}
    assert rows_of(adapting.unlabelled) == {"t": [4, 5, 6]}
    assert plain.held_out == adapting.held_out == ()
    plans = site_plans(named("kd3a"), data(), SPLIT)
    assert [(plan.name, plan.role, plan.parts[0][2]) for plan in plans] == [
        ("b", "source", 0), ("a", "source", 1), ("t", "target", 2),
    ]  # fmt: skip
    split = LeaveOneOut().split_of(data(), "a", 0)
    plans = site_plans(named("fedavg"), data(), split)
    assert [plan.name for plan in plans] == ["b", "t"]
    assert [number for plan in plans for _, _, number in plan.parts] == [0, 1]
    (pool,) = site_plans(named("deepall"), data(), split)
    assert pool.name == POOL
    assert [part[0].name for part in pool.parts] == ["b", "t"]
    (pool,) = site_plans(named("deepall"), data(), SPLIT)
    assert site_budget({"a": 12, "b": 5}, [pool]) == {"pool": 17}
    two = site_plans(named("fedavg"), data(), Split(SPLIT.train, {}, SPLIT.measured))
    assert site_budget({"a": 12, "b": 5}, two) == {"a": 12, "b": 5}


def test_bytes_that_a_pool_moves() -> None:
    # Training rows of 5 numbers of 4 bytes; nothing where nothing is pooled.
    assert pooled_bytes(named("deepall"), data(), SPLIT) == {"a": 120, "b": 40}
    assert pooled_bytes(named("mdan"), data(), SPLIT) == {"a": 120, "b": 40, "t": 60}
    assert pooled_bytes(named("kd3a"), data(), SPLIT) == {}
    # An image has 4 · 4 numbers of 4 bytes, its 2 masks have 4 · 4 of one byte; the target's masks stay.
    images, masks = np.zeros((9, 1, 4, 4), np.float32), np.zeros((9, 2, 4, 4), np.uint8)
    found = {name: Domain(name, images, np.zeros(9, np.int64), masks=masks) for name in ("a", "b", "t")}
    whole = DataSet("x", found, ("cup", "disc"), Preprocessing(kind="features"), Manifest(*[""] * 5))
    assert pooled_bytes(named("deepall"), whole, SPLIT) == {"a": 6 * (64 + 32), "b": 2 * (64 + 32)}
    assert pooled_bytes(named("mdan"), whole, SPLIT)["t"] == 3 * 64


def test_runs_come_seed_by_seed(tmp_path: Path) -> None:
    options = experiment(
        sites(tmp_path), protocol={"targets": ["c", "a"], "seeds": [4, 1]}, methods=["deepall", "fedavg"]
    )
    resolved = parse(options)
    order = [
        (planned.run.seed, planned.run.target, planned.run.method.name)
        for planned in Plan(resolved, resolved.data.build()).runs
    ]
    assert order == [
        (seed, target, method) for seed in (4, 1) for target in ("c", "a") for method in ("deepall", "fedavg")
    ]


def test_a_split_is_computed_once_for_all_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    split_of = LeaveOneOut.split_of

    def counted(protocol: LeaveOneOut, data: DataSet, target: str, seed: int) -> Split:
        asked.append((target, seed))
        return split_of(protocol, data, target, seed)

    monkeypatch.setattr(LeaveOneOut, "split_of", counted)
    protocol = {"targets": ["a", "b"], "seeds": [3, 5], "test_fraction": 0.3}
    whole = parse(experiment(sites(tmp_path), protocol=protocol, methods=["fedavg", "deepall"]))
    plan = Plan(whole, whole.data.build())
    for planned in (*plan.runs, *plan.runs):
        run = planned.run
        expected = split_of(whole.protocol, plan.data, run.target, run.seed)
        assert {name: rows.tolist() for name, rows in planned.split.train.items()} == {
            name: rows.tolist() for name, rows in expected.train.items()
        }
        assert planned.budget == budgets(run.method, whole.methods, whole.training, expected)
        assert planned.identity["training"]["mini_batches"] == planned.budget
        assert planned.setting("cpu").seed == planned.identity["seed"] == run.seed
        assert planned.folder == Path(run.method.name, run.target, f"seed-{run.seed}")
    assert asked == [("a", 3), ("b", 3), ("a", 5), ("b", 5)]


def test_what_a_run_hands_to_its_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed its own setting, the engine's quorum, and what single sites refuse."""
    seen: list[tuple[Any, Any, Any]] = []
    plain = round_loop.LocalFederation

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, plans: Any, setting: Any, **options: Any) -> None:
            seen.append((plans, setting, options))
            super().__init__(plans, setting, **options)

    monkeypatch.setattr(round_loop, "LocalFederation", Watched)
    engine = {"name": "local", "threads": 1, "quorum": 1, "on_refusal": "leave_out", "refuse_at": {"c": ["styles"]}}
    protocol = {"targets": ["a"], "seeds": [3, 5], "test_fraction": 0.3}
    fedshift.run(experiment(sites(tmp_path), engine=engine, protocol=protocol), tmp_path / "runs")
    assert [setting.seed for _, setting, _ in seen] == [3, 5]
    for plans, setting, options in seen:
        assert {plan.name: set(plan.refuse) for plan in plans} == {"b": set(), "c": {"styles"}}
        assert options["quorum"] == 1
        assert options["on_refusal"] == setting.on_refusal == "leave_out"
        assert options["rounds"] == 2
        assert options["budget"] == {"b": 6, "c": 6}  # 3 mini-batches a round each
