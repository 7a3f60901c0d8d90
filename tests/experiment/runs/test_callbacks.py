"""Callbacks, trackers and the progress of a notebook hear of every round and every run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.stored import read_rounds
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.lines import notebook_reporter
from fedshift.report.trackers import tracker


class Noting(fedshift.Callback):
    def __init__(self, stop_after: int = 99) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.stop_after = stop_after

    def after_round(self, run: Run, record: RoundRecord, folder: Path) -> None:
        self.heard.append((run.target, run.seed, record.round))
        assert (folder / "rounds.jsonl").read_text().splitlines()[-1] == record.model_dump_json()
        if record.round == self.stop_after:
            raise KeyboardInterrupt

    def after_run(self, run: Run, result: RunResult, folder: Path) -> None:
        self.heard.append((run.target, run.seed, result.score()))
        assert (folder / "model.safetensors").exists()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = small.sites(tmp_path_factory.mktemp("data"))
    return small.experiment(where, protocol={"targets": ["a", "b"], "seeds": [0]})


def test_callbacks_are_called_after_each_round_and_each_run(options: dict[str, Any], tmp_path: Path) -> None:
    noting = Noting()
    results = fedshift.run(options, tmp_path, callbacks=[noting])
    scores = {run.target: run.score() for run in results.runs}
    assert noting.heard == [
        *(("a", 0, 1), ("a", 0, 2), ("a", 0, scores["a"])),
        *(("b", 0, 1), ("b", 0, 2), ("b", 0, scores["b"])),
    ]
    again = Noting()
    fedshift.run(options, tmp_path, callbacks=[again])
    assert again.heard == []  # nothing ran


@pytest.mark.slow
def test_runs_of_further_processes_are_passed_on_at_the_end(options: dict[str, Any], tmp_path: Path) -> None:
    noting = Noting()
    seeds = {"targets": ["a", "b"], "seeds": [0, 1]}
    parallel = {"name": "local", "threads": 1, "parallel_runs": 2}
    fedshift.run({**options, "protocol": seeds, "engine": parallel}, tmp_path, callbacks=[noting])
    heard = [entry for entry in noting.heard if isinstance(entry[2], int)]
    assert sorted(heard) == [(target, seed, number) for target in "ab" for seed in (0, 1) for number in (1, 2)]
    assert len(noting.heard) == len(heard) + 4


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_trackers_have_every_round_also_of_a_resumed_run(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    one = {**options, "protocol": {"targets": ["a"], "seeds": [0]}}
    with pytest.raises(KeyboardInterrupt):
        fedshift.run(one, tmp_path, callbacks=[name, Noting(stop_after=1)])
    folder = fedshift.run(one, tmp_path, callbacks=[name]).collected.runs[0].folder
    written = READERS[name](tmp_path, folder)
    wanted = {
        (number, record.round): pytest.approx(value)
        for record in read_rounds(folder / "rounds.jsonl")
        for number, value in record.numbers().items()
    }
    assert written == wanted


def from_tensorboard(_runs: Path, folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {(tag, one.step): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}


def from_mlflow(runs: Path, _folder: Path) -> dict[tuple[str, int], float]:
    from mlflow import MlflowClient

    client = MlflowClient((runs / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("small")
    ended = [run for run in client.search_runs([experiment.experiment_id]) if run.info.status == "FINISHED"]
    (run,) = ended
    assert run.data.params == {"method": "fedavg", "target": "a", "seed": "0"}
    return {
        (name, one.step): one.value
        for name in run.data.metrics
        for one in client.get_metric_history(run.info.run_id, name)
    }


READERS = {"tensorboard": from_tensorboard, "mlflow": from_mlflow}


def test_weights_and_biases_gets_every_round_and_stays_offline(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    logged: dict[int, dict[str, float]] = {}
    place = SimpleNamespace(log=lambda numbers, step: logged.update({step: numbers}), finish=lambda: begun.append({}))
    wandb = SimpleNamespace(init=lambda **given: begun.append(given) or place, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    one = {**options, "protocol": {"targets": ["a"], "seeds": [0]}}
    folder = fedshift.run(one, tmp_path, callbacks=["wandb"]).collected.runs[0].folder
    assert (begun[0]["mode"], begun[0]["project"], begun[0]["dir"]) == ("offline", "small", str(tmp_path))
    assert begun[1:] == [{}]  # it was finished
    assert logged == {record.round: record.numbers() for record in read_rounds(folder / "rounds.jsonl")}


def test_a_missing_tracker_and_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="tensorboard"):
        tracker("tensorbord")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"fedshift\[trackers\]"):
        tracker("mlflow")
    assert notebook_reporter() is None
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    modules = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=object())
    modules[0].get_ipython = lambda: shell  # type: ignore[attr-defined]
    modules[1].display = lambda *_, **__: handle  # type: ignore[attr-defined]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    reporter = notebook_reporter()
    assert reporter is not None
    for line in ("first", "second"):
        reporter.extraction(line, 3, 0)
        reporter.warn(f"of {line}")
    reporter.extraction("third", 3, 0)
    assert shown[-1].splitlines()[:2] == ["warning: of first", "warning: of second"]
    assert "third" in shown[-1]
    assert "features of second" not in shown[-1]
    del shell.kernel  # IPython in a terminal
    assert notebook_reporter() is None
