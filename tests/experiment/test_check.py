"""`fedshift.check` foretells what runs do (work, rounds, bytes), and trains nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small import experiment, features, save, sites

import fedshift
from fedshift.data.domain import Domain, Rows
from fedshift.errors import UserError
from fedshift.experiment.check import Progress
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.protocols import one_target
from fedshift.methods.base import RunPlan, Traffic
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.report.check_words import of_runs
from fedshift.report.conditions import conditions
from tried import slow

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
    where = save(tmp_path, a=features(1, 40), b=features(2, 40), c=features(3, 40))
    methods = ["fedavg", {"name": "fedavg", "label": "halves", "exchanges_per_epoch": 2}]
    whole, halves = fedshift.check(experiment(where, methods=methods, model="linear")).methods
    assert halves.rounds == 2 * whole.rounds
    assert halves.mini_batches_per_round == whole.mini_batches_per_round / 2
    for method in (whole, halves):
        assert method.rounds * method.mini_batches_per_round == method.mini_batches_per_site


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("linear", {}),
        slow("linear", {"mini_batches": 40}),
        slow(NORMALISED, {"mini_batches": 7}),
        slow(NORMALISED, {"rounds": 5}),
    ],
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


@pytest.mark.slow
def test_check_foretells_the_steps_that_tables_say(tmp_path: Path) -> None:
    """And says so, before training, where a mini-batch is too small to be divided over the domains."""
    where = save(tmp_path, a=features(1, 30), b=features(2, 50), c=features(3, 90))
    methods = [
        "deepall",
        "fedavg",
        "mdan",
        {"name": "mdan", "label": "split", "domain_batches": "split"},
        {"name": "deepall", "label": "by_domain", "domain_batches": "full"},
    ]
    options = experiment(where, methods=methods, model="linear", protocol={"kind": "adapt_to_one", "targets": ["a"]})
    foretold = fedshift.check(options).methods
    results = fedshift.run(options, tmp_path / "runs")
    said = {name: row.steps for name, row in conditions(results.runs).items()}
    assert said == {method.label: method.steps for method in foretold}
    assert said["fedavg"] is None
    assert said["split"] == pytest.approx(said["deepall"], abs=1)  # a target's share is rounded, too
    assert said["mdan"] == said["split"] / 3
    assert said["by_domain"] == said["deepall"] / 2
    options["training"]["batch_size"] = 5
    with pytest.raises(UserError, match="batch_size"):
        fedshift.check(options)


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
    traits = FedAvg.traits.derive(name="greedy")

    def fit(self, site: Site, weights: Weights) -> Update:
        list(site.batches(steps=1))[0]
        return super().fit(site, weights)

class Many(FedAvg):
    traits = FedAvg.traits.derive(name="many")

    def round(self, federation: Federation, state: State) -> State:
        raise UserError(f"many: {len(federation.sources)} sites are too few")
"""


def test_what_check_finds_of_methods_of_others(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    options = experiment(sites(tmp_path / "data"), methods=["fedavg", f"{tmp_path}/own.py:Greedy"])
    fedavg, greedy = fedshift.check(options).methods
    assert fedavg.bytes_up
    assert (greedy.bytes_up, greedy.bytes_down) == (None, None)
    (warning,) = fedshift.check(options).warnings
    assert "greedy" in warning
    assert "IndexError" in warning
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    with pytest.raises(UserError, match="2 sites are too few"):
        fedshift.check(experiment(sites(tmp_path / "data"), methods=[f"{tmp_path}/own.py:Many"]))


@pytest.mark.case("many sites", "check of twice as many sites splits twice as many domains")
def test_check_splits_each_domain_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, split = save(tmp_path, a=features(1, 200), b=features(2, 200), c=features(3, 200)), one_target.part_rows
    calls: list[str] = []

    def counted(domain: Domain, *arguments: Any) -> tuple[Rows, Rows]:
        calls.append(domain.name)
        return split(domain, *arguments)

    monkeypatch.setattr(one_target, "part_rows", counted)
    counts = []
    for each in (5, 10, 20):
        calls.clear()
        found = fedshift.check(experiment(where, protocol={"targets": ["a"], "seeds": [0], "sites_each": each}))
        counts.append(len(calls) / len(found.domains))
    assert counts[2] <= counts[0] <= 10, counts


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


@pytest.mark.parametrize("others", [0, 2])
def test_runs_of_others_in_a_folder_are_told_before_the_first_is_finished(tmp_path: Path, others: int) -> None:
    told = SimpleNamespace(progress=Progress(0, 4, others=others), encoding_shares=(), warnings=())
    lines = [line.text for line in of_runs(parse(experiment(sites(tmp_path))), cast(Any, told), tmp_path / "runs")]  # type: ignore[union-attr]
    assert len(lines) == others // 2
    assert all("0 of 4 runs" in line and "2 more" in line for line in lines)
