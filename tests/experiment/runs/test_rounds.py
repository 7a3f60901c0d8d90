"""What a run writes down round by round, and what a run that goes on takes over from the one that stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import Stop, StopAfter, experiment, outcome, sites

import fedshift
from tried import slow

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "csac": {"name": "csac", "acquisition_epochs": 2, "calibration_epochs": 1},
    "deepall": {"name": "deepall"},
}
TRAINING = {"rounds": 4, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "reset_optimizer_each_round": False}


def options(where: dict[str, str], method: str, **training: Any) -> dict[str, Any]:
    return experiment(
        where, methods=[METHODS[method]], model={"name": "mlp", "hidden": [6]}, training={**TRAINING, **training}
    )


def run_of(runs: Path, method: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of ``rounds.jsonl`` and the result."""
    folder = runs / "small" / method / "a" / "seed-0"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounds", [slow(1), 3])
def test_a_run_that_goes_on_ends_as_if_it_had_not_stopped(method: str, rounds: int, tmp_path: Path) -> None:
    """Weights, rounds, selected rounds, mini-batches and bytes; and the seconds before are counted."""
    asked = options(sites(tmp_path / "data"), method)
    fedshift.run(asked, tmp_path / "whole")
    for _ in range(2 if rounds == 1 else 1):  # stopped twice, or late
        with pytest.raises(Stop):
            fedshift.run(asked, tmp_path / "parts", StopAfter(rounds))
    fedshift.run(asked, tmp_path / "parts")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    lines, result = run_of(tmp_path / "parts", method)
    assert result["seconds"] == pytest.approx(sum(line["seconds"] for line in lines), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_numbers_of_a_run_are_the_sums_of_its_rounds(method: str, tmp_path: Path) -> None:
    """Sites b and c: 24 and 33 samples, 30 % held out of each class of 8 (2) and 11 (3): 18 and 24 are trained on.

    Batches of 8 make 3 and 3 a pass, so an epoch is 3 mini-batches a source.
    """
    asked = options(sites(tmp_path / "data"), method)
    fedshift.run(asked, tmp_path / "runs")
    lines, result = run_of(tmp_path / "runs", method)
    assert result["data"]["training_samples"] == {"b": 18, "c": 24}
    before = 6 if method == "csac" else 0
    first = 0 if method == "csac" else 1
    assert [line["round"] for line in lines] == list(range(first, 5))
    assert [line["mini_batches"] for line in lines] == [before + 3 * number for number in range(first, 5)]
    assert result["mini_batches"] == lines[-1]["mini_batches"]
    for way in ("up", "down"):
        kinds = {kind for line in lines for kind in line["bytes"][way]}
        assert result[f"bytes_{way}"] == {
            kind: sum(line["bytes"][way].get(kind, 0) for line in lines) for kind in kinds
        }
    assert result["bytes_up"] != result["bytes_down"]
    # An mlp of 5 → 6 → 3: 36 + 21 numbers of 4 bytes. A pool moves each sample once: 42 of 5 numbers.
    if method == "deepall":
        assert result["bytes_up"]["raw_data"] == 42 * 5 * 4
        assert lines[0]["bytes"]["up"]["raw_data"] == 42 * 5 * 4
    else:
        assert result["bytes_down"]["weights"] == 2 * 4 * 57 * 4
        assert "raw_data" not in result["bytes_up"]
    by_site = result["bytes_by_site"]["sites"]
    assert result["bytes_by_site"]["number"] == len(by_site)
    for way in ("up", "down"):
        kinds = {kind for both in by_site.values() for kind in both[way]}
        assert result[f"bytes_{way}"] == {
            kind: sum(both[way].get(kind, 0) for both in by_site.values()) for kind in kinds
        }
    if method == "deepall":
        assert {name: both["up"]["raw_data"] for name, both in by_site.items() if name != "pool"} == {
            "b": 18 * 5 * 4,
            "c": 24 * 5 * 4,
        }
    else:
        assert {name: both["down"]["weights"] for name, both in by_site.items()} == {"b": 4 * 57 * 4, "c": 4 * 57 * 4}
    assert not (tmp_path / "runs" / "small" / method / "a" / "seed-0" / "bytes.json").exists(), "only while it lasts"


@pytest.mark.parametrize(("every", "measured"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_which_rounds_are_measured(every: int, measured: list[int], tmp_path: Path) -> None:
    """Every so many rounds, and the last one whatever its number."""
    fedshift.run(options(sites(tmp_path / "data"), "fedavg", rounds=5, measure_every=every), tmp_path / "runs")
    lines, result = run_of(tmp_path / "runs", "fedavg")
    assert [line["round"] for line in lines if line["target_accuracy"]] == measured
    assert result["selected"]["last"]["round"] == 5


def test_a_site_that_was_missing_once_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.errors import TrainingDiverged
    from fedshift.federation.site import Site
    from fedshift.methods.federated.fedavg import FedAvg

    plain = FedAvg.fit

    def fit(self: FedAvg, site: Site, weights: Any) -> Any:
        if site.name == "b" and site.envelope.round == 2:
            raise TrainingDiverged("its disk was full")
        return plain(self, site, weights)

    monkeypatch.setattr(FedAvg, "fit", fit)
    asked = {**options(sites(tmp_path / "data"), "fedavg"), "engine": {"name": "local", "threads": 1, "quorum": 1}}
    fedshift.run(asked, tmp_path / "runs")
    lines, _ = run_of(tmp_path / "runs", "fedavg")
    named = [line["round"] for line in lines if "missing" in line["extra"]]
    assert named == [2]
    assert [sorted(line["aggregation_weights"]) for line in lines][:3] == [["b", "c"], ["c"], ["b", "c"]]
