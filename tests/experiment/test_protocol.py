"""Who trains on what, who is tested on what, and that every method does the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import experiment, features, save, sites

import fedshift
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing, SparseRows, part_of
from fedshift.data.site_data import batches_per_epoch, epoch_batches
from fedshift.errors import UserError
from fedshift.experiment.budgets import budgets, rounds_needed, site_budget
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.config.sections import LeaveOneOut, LocalEngine
from fedshift.experiment.plan import POOL, Plan, site_plans
from fedshift.experiment.protocol import Split, split_of, taking_part
from fedshift.federation.site_runner import SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import RunPlan, Traffic
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.pooled.deepall import DeepAll

FOLDER = Manifest("", "", "", "", "")


def data_of(**domains: Domain) -> DataSet:
    return DataSet("x", domains, ("0", "1", "2"), Preprocessing(kind="features"), FOLDER)


def domain(name: str, samples: int, groups: Any = None, **official: Any) -> Domain:
    labels = np.arange(samples) % 3
    return Domain(name, np.zeros((samples, 2), np.float32), labels, groups, **official)


def test_no_base_image_on_both_sides() -> None:
    """Rotated digits: with disjoint base images none that a source trained on is measured at the target."""
    data = parse({"data": {"name": "rotated_digits", "per_class": 20}, "model": "mnist_cnn", "methods": ["fedavg"]})
    built = data.data.build()
    for seed in range(3):
        careful = split_of(LeaveOneOut(test_fraction=0.3), built, "D30", seed)
        groups = {name: set(built.domains[name].groups[rows].tolist()) for name, rows in careful.train.items()}
        measured = set(built.domains["D30"].groups[careful.measured["D30"]].tolist())
        held_out = {name: set(built.domains[name].groups[rows].tolist()) for name, rows in careful.held_out.items()}
        assert "D30" not in groups
        assert len(measured) == 60  # 30 % of 200
        for name, trained in groups.items():
            assert not trained & measured
            assert trained | held_out[name] == set(range(200))
            assert not trained & held_out[name]
        shared = split_of(LeaveOneOut(test_fraction=0.3, base_images="shared"), built, "D30", seed)
        assert len(shared.measured["D30"]) == 200
        assert all(np.array_equal(shared.train[name], careful.train[name]) for name in shared.train)


def test_the_reading_of_the_literature() -> None:
    """test_fraction 0 and shared base images: sources train on everything, the target is measured on everything."""
    groups = np.arange(30)
    data = data_of(a=domain("a", 30, groups), b=domain("b", 30, groups), c=domain("c", 30, groups))
    split = split_of(LeaveOneOut(test_fraction=0, base_images="shared"), data, "b", 0)
    assert {name: len(rows) for name, rows in split.train.items()} == {"a": 30, "c": 30}
    assert {name: len(rows) for name, rows in split.held_out.items()} == {"a": 0, "c": 0}
    assert len(split.measured["b"]) == 30
    with pytest.raises(UserError, match="test_fraction"):
        split_of(LeaveOneOut(test_fraction=0), data, "b", 0)


def test_domains_that_share_nothing_are_measured_whole() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 20))
    split = split_of(LeaveOneOut(test_fraction=0.5), data, "a", 0)
    assert len(split.measured["a"]) == 30
    assert sorted([*split.train["b"], *split.held_out["b"]]) == list(range(20))


def test_splits_depend_on_the_seed_alone() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 60), c=domain("c", 60))
    protocol = LeaveOneOut(test_fraction=0.4)
    first, again = split_of(protocol, data, "a", 0), split_of(protocol, data, "a", 0)
    other_target = split_of(protocol, data, "b", 0)
    other_seed = split_of(protocol, data, "a", 1)
    assert np.array_equal(first.train["c"], again.train["c"])
    assert np.array_equal(first.train["c"], other_target.train["c"])
    assert not np.array_equal(first.train["c"], other_seed.train["c"])


def test_official_parts() -> None:
    train, test = np.array([5, 1, 0]), np.array([2, 3, 4])
    known = domain("a", 6, train_rows=train, test_rows=test)
    data = data_of(a=known, b=domain("b", 9))
    auto = split_of(LeaveOneOut(), data, "b", 0)
    assert auto.train["a"].tolist() == [0, 1, 5]
    assert auto.held_out["a"].tolist() == [2, 3, 4]
    with pytest.raises(UserError, match=r"'b'.*official"):
        split_of(LeaveOneOut(split="official"), data, "a", 0)
    random = [split_of(LeaveOneOut(split="random"), data, "b", seed).train["a"].tolist() for seed in range(5)]
    assert any(rows != [0, 1, 5] for rows in random)
    empty = data_of(a=domain("a", 6, train_rows=test[:0], test_rows=test), b=domain("b", 9))
    with pytest.raises(UserError, match="'a' has no training samples"):
        split_of(LeaveOneOut(), empty, "b", 0)


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 40))
def test_batches_per_epoch_are_those_that_are_drawn(samples: int, batch_size: int) -> None:
    import torch

    drawn = epoch_batches(samples, batch_size, torch.Generator().manual_seed(0))
    assert len(drawn) == batches_per_epoch(samples, batch_size)


SITE_SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 90), min_size=1)


@given(
    sizes=SITE_SIZES,
    epochs=st.integers(1, 6),
    acquisition=st.integers(0, 8),
    rounds=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    fixed=st.none() | st.integers(1, 60),
)
def test_equal_work(
    sizes: Mapping[str, int], epochs: int, acquisition: int, rounds: int, batch_size: int, fixed: int | None
) -> None:
    """All methods do the same work in total, and the sites of a method are done in the same round."""
    split = Split({name: np.arange(size) for name, size in sizes.items()}, {}, {"t": np.zeros(0, np.int64)})
    csac = CSAC(acquisition_epochs=acquisition + 1, calibration_epochs=epochs)
    steps = CSAC(label="steps", acquisition_steps=acquisition + 1, calibration_steps=epochs)
    methods = [FedAvg(local_epochs=2), csac, steps, DeepAll()]
    training = Training(rounds=rounds, batch_size=batch_size, mini_batches=fixed)
    per_epoch = {name: batches_per_epoch(size, batch_size) for name, size in sizes.items()}
    needs = [sum(method.mini_batches(number, rounds) for number in per_epoch.values()) for method in methods]
    total = fixed * len(sizes) if fixed else max(needs)
    for method in methods:
        budget = budgets(method, methods, training, split)
        assert total <= sum(budget.values()) < total + len(sizes)
        if method.pooled:
            assert site_budget(budget, [SitePlan(POOL, "source", ())]) == {POOL: sum(budget.values())}
            continue
        assert site_budget(budget, [SitePlan(name, "source", ()) for name in sizes]) == budget
        needed = rounds_needed(method, training, split, budget)
        for name, number in per_epoch.items():
            assert method.mini_batches(number, max(needed, 1)) >= budget[name]
            if needed > 1:  # in the last round every site still has something to do
                assert method.mini_batches(number, needed - 1) < budget[name]


def test_the_pool_spreads_its_work_over_the_rounds() -> None:
    split = Split({"a": np.arange(40), "b": np.arange(10)}, {}, {"t": np.zeros(0, np.int64)})
    methods = [FedAvg(local_epochs=3), DeepAll()]
    training = Training(rounds=7, batch_size=8)
    budget = budgets(methods[1], methods, training, split)
    assert sum(budget.values()) == 3 * 7 * (5 + 2)
    assert rounds_needed(methods[1], training, split, budget) == 7


def test_sites_counted_in_epochs_and_steps_end_together() -> None:
    split = Split({"big": np.arange(400), "small": np.arange(40)}, {}, {"t": np.zeros(0, np.int64)})
    fedavg, csac = FedAvg(), CSAC(acquisition_steps=10, calibration_steps=40)
    training = Training(rounds=5, batch_size=20)
    budget = budgets(fedavg, [fedavg, csac], training, split)
    assert budget == {"big": 382, "small": 39}  # 420 in all, 10 to 1 as the batches of an epoch
    assert rounds_needed(fedavg, training, split, budget) == 20


def test_the_target_is_not_among_the_sites() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 20), c=domain("c", 9))
    split = split_of(LeaveOneOut(), data, "b", 0)
    plans = site_plans(FedAvg(), data, split)
    assert [plan.name for plan in plans] == ["a", "c"]
    assert [number for plan in plans for _, _, number in plan.parts] == [0, 1]
    (pool,) = site_plans(DeepAll(), data, split)
    assert pool.name == POOL
    assert [part[0].name for part in pool.parts] == ["a", "c"]


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


METHODS = [
    "deepall",
    "fedavg",
    {"name": "fedavg", "label": "fedavg3", "local_epochs": 3},
    {"name": "csac", "acquisition_epochs": 4, "calibration_epochs": 2},
]


NORMALISED = {"name": "mlp", "hidden": [4], "batch_norm": True}


def test_every_method_does_the_same_work(tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1, 30), b=features(2, 50), c=features(3, 90))
    results = fedshift.run(experiment(where, methods=METHODS), tmp_path / "runs")
    assert len({run.mini_batches for run in results.runs}) == 1
    assert {run.method: run.rounds for run in results.runs} == {"deepall": 2, "fedavg": 8, "fedavg3": 3, "csac": 2}


@pytest.mark.parametrize(
    ("model", "training"),
    [("linear", {}), ("linear", {"mini_batches": 40}), (NORMALISED, {"mini_batches": 7}), (NORMALISED, {"rounds": 5})],
)
def test_check_foretells_the_run(tmp_path: Path, training: dict[str, Any], model: Any) -> None:
    """Bytes each way, rounds and mini-batches are those that the finished runs report."""
    where = save(tmp_path, a=features(1, 30), b=features(2, 50), c=features(3, 90))
    options = experiment(where, methods=METHODS, model=model, protocol={"targets": ["a"], "seeds": [0, 1]})
    options["training"].update(training)
    foretold = fedshift.check(options)
    results = fedshift.run(options, tmp_path / "runs")
    assert {domain.name: domain.train for domain in foretold.domains if domain.name != "a"} == results.runs[0].data[
        "training_samples"
    ]
    for method in foretold.methods:
        runs = [run for run in results.runs if run.method == method.label]
        assert method.runs == len(runs) == 2
        assert {run.rounds for run in runs} == {method.rounds}
        assert {run.mini_batches for run in runs} == {method.mini_batches_per_site}
        assert sum(sum(run.bytes_up.values()) for run in runs) == method.bytes_up, method.label
        assert sum(sum(run.bytes_down.values()) for run in runs) == method.bytes_down, method.label
        assert set(method.shares) >= set(runs[0].bytes_up)


def test_a_method_that_foretells_its_bytes_is_told_of_whole_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RunPlan] = []

    def traffic(self: FedAvg, plan: RunPlan) -> Traffic:
        told.append(plan)
        return plan.dry

    monkeypatch.setattr(FedAvg, "traffic", traffic)
    where = save(tmp_path, a=features(1, 30), b=features(2, 50), c=features(3, 90))
    found = fedshift.check(experiment(where, methods=["fedavg"], protocol={"targets": ["a"], "seeds": [0]}))
    assert told[0].samples == {domain.name: domain.train for domain in found.domains if domain.name != "a"}
    assert told[0].dry_samples == {"b": 2, "c": 2}
    assert told[0].rounds == found.methods[0].rounds


OWN = """from fedshift.methods import FedAvg, Federation, Site, State, Update, UserError, Weights

class Greedy(FedAvg):
    name = "greedy"
    citation = "2026"

    def fit(self, site: Site, weights: Weights) -> Update:
        list(site.batches(steps=1))[0]
        return super().fit(site, weights)

class Many(FedAvg):
    name = "many"
    citation = "2026"

    def round(self, federation: Federation, state: State) -> State:
        raise UserError(f"many: {len(federation.sources)} sites are too few")
"""


def test_check_does_without_the_bytes_of_a_method_that_has_to_train_first(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    options = experiment(sites(tmp_path / "data"), methods=["fedavg", f"{tmp_path}/own.py:Greedy"])
    fedavg, greedy = fedshift.check(options).methods
    assert fedavg.bytes_up
    assert (greedy.bytes_up, greedy.bytes_down) == (None, None)
    (warning,) = fedshift.check(options).warnings
    assert "greedy" in warning
    assert "IndexError" in warning


def test_check_finds_what_a_method_refuses_in_its_first_round(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    with pytest.raises(UserError, match="2 sites are too few"):
        fedshift.check(experiment(sites(tmp_path / "data"), methods=[f"{tmp_path}/own.py:Many"]))


def test_check_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = sites(tmp_path / "data")
    found = fedshift.check(experiment(where, methods=METHODS))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert found.classes == ("0", "1", "2")
    assert [(domain.name, domain.samples, domain.measured_as_target) for domain in found.domains] == [
        ("a", 30, 30), ("b", 24, 24), ("c", 33, 33),
    ]  # fmt: skip
    assert found.parameters == 18
    assert found.payload == 72


def test_threads_as_written_else_as_the_environment_says_else_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LocalEngine(workers=2, parallel_runs=2).thread_count() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert LocalEngine(workers=2).thread_count() == 3
    assert LocalEngine(threads=1).thread_count() == 1
    for strange in ("", "0", "4,2", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", strange)
        assert LocalEngine().thread_count() == 8


@pytest.mark.parametrize(("sites_each", "grouped"), [(1, False), (4, False), (4, True)])
def test_sources_are_cut_into_sites_that_share_no_sample(sites_each: int, grouped: bool) -> None:
    """Every sample of a source is at one of its sites, with its label; groups stay together; the target is whole."""
    groups = np.arange(30) // 2 if grouped else None
    marked = [replace(domain(name, 30, groups), inputs=np.arange(60, dtype=np.float32).reshape(30, 2)) for name in "ab"]
    data = data_of(a=marked[0], b=marked[1])
    found = taking_part(LeaveOneOut(targets=("b",), sites_each=sites_each), data).domains
    names = ["a"] if sites_each == 1 else [f"a.{number}" for number in range(1, sites_each + 1)]
    assert list(found) == [*names, "b"]
    rows = [found[name].inputs[:, 0] / 2 for name in names]  # type: ignore[index]
    assert sorted(np.concatenate(rows)) == list(range(30))
    for name, own in zip(names, rows, strict=True):
        assert np.array_equal(found[name].labels, own % 3)
    if grouped:
        at = [{int(row) // 2 for row in own} for own in rows]
        assert sum(map(len, at)) == 15


def test_cut_by_labels_the_sites_classes_differ() -> None:
    data = data_of(a=domain("a", 300), b=domain("b", 3))

    def spread(**options: Any) -> float:
        found = taking_part(LeaveOneOut(targets=("b",), sites_each=5, **options), data).domains
        sizes = [len(one) for name, one in found.items() if name != "b"]
        assert sizes == [60] * 5
        shares = [np.bincount(one.labels, minlength=3) / 60 for name, one in found.items() if name != "b"]
        return float(np.std(shares, axis=0).mean())

    assert spread(cut_by="labels", label_skew=0.1) > 0.25 > 0.12 > spread(cut_by="labels", label_skew=100.0)
    assert spread() < 0.12


def test_rows_of_a_sparse_site_and_of_its_own_split() -> None:
    dense = np.array([[0, 1, 0], [2, 0, 3], [0, 0, 0], [4, 0, 0]], np.float32)
    indptr = np.array([0, 1, 3, 3, 4])
    sparse = SparseRows(dense[dense > 0], np.array([1, 0, 2, 0]), indptr, 3)
    whole = Domain("a", sparse, np.arange(4), train_rows=np.array([0, 3]), test_rows=np.array([1, 2]))
    part = part_of(whole, np.array([3, 1]), "a.1")
    assert isinstance(part.inputs, SparseRows)
    assert part.inputs.dense(np.arange(2)).tolist() == [[4, 0, 0], [2, 0, 3]]
    assert part.train_rows is not None
    assert part.test_rows is not None
    assert (part.train_rows.tolist(), part.test_rows.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": "all"}, "one target"),
        ({"targets": ("a", "b")}, "one target"),
        ({"targets": ("b",), "sites_each": 31}, "30 samples"),
    ],
)
def test_what_cannot_be_cut(options: dict[str, Any], said: str) -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 30))
    with pytest.raises(UserError, match=said):
        taking_part(LeaveOneOut(**{"sites_each": 2, **options}), data)
