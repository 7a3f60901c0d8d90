"""An interrupted run ends bit for bit as an uninterrupted one, wherever and however it was interrupted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from adapting import adapting
from calling import Cli
from safetensors.numpy import load_file
from small import (
    Stop,
    command,
    experiment,
    features,
    images,
    lines,
    outcome,
    process,
    processes_below,
    save,
    sites,
    wait_for,
    write,
)

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.run_log import RunLog
from fedshift.federation.message_files import read_message
from tried import slow

FEDAVG = {"name": "fedavg"}
CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
DEEPALL = {"name": "deepall"}


def with_momentum(options: dict[str, Any]) -> dict[str, Any]:
    """Sites keep their optimiser, which then has to survive too."""
    options["training"]["reset_optimizer_each_round"] = False
    options["training"]["momentum"] = 0.9
    return options


AVERAGED = {"name": "fedavg", "label": "averaged", "average_rounds": 2, "robust": "norm_clipping", "server": "adam"}
REMEMBERING: dict[str, Any] = {
    "name": "kd3a",
    "gate_start": 0.5,
    "gate_end": 0.6,
    "private_classifier": True,
    "batch_norm": "off",
    "share_momentum": 0.5,
}
"""As much as KD3A can remember: heads, statistics, shares of the round before, and momentum."""


def small(folder: Path, method: dict[str, Any]) -> dict[str, Any]:
    """Two rounds of a method; KD3A's with a target that takes part and a site with wrong labels."""
    if method is REMEMBERING:
        return with_momentum(adapting(sites(folder), {"wrong_labels": {"c": 0.2}}, methods=[method]))
    return with_momentum(experiment(sites(folder), methods=[method], model={"name": "mlp", "hidden": [4]}))


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (FEDAVG, "replace"),
        *(slow(method, "replace") for method in (CSAC, DEEPALL, AVERAGED, REMEMBERING)),
        slow(FEDAVG, "fsync"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("label", value["name"]),
)
def test_a_kill_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], how: str) -> None:
    """The process ends at the n-th flush or renaming of a file, for every n, and once more in the resumed run."""
    options = small(tmp_path, method)
    fedshift.run(options, tmp_path / "whole")
    wanted = outcome(tmp_path / "whole")
    original = getattr(os, how)
    calls = 0

    def killed(*arguments: Any) -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Stop
        original(*arguments)

    monkeypatch.setattr(os, how, killed)
    runs = tmp_path / "runs"
    for moment in range(1, 100):
        shutil.rmtree(runs, ignore_errors=True)
        calls = moment
        try:
            fedshift.run(options, runs)
        except Stop:
            calls = 4  # order.json, rounds.jsonl or a checkpoint of the resumed run
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
def test_kill_9_again_and_again(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path, images), methods=[CSAC], model={"name": "mnist_cnn", "channels": [2, 3]})
    options["training"]["rounds"] = 4
    fedshift.run(options, tmp_path / "whole")
    runs = tmp_path / "runs"
    part = runs / "small" / "csac" / "a" / "seed-0"
    for done, pause in ((0, 0.03), (1, 0.0), (1, 0.05), (2, 0.01), (3, 0.03)):
        running = process(options, runs)
        wait_for(lambda done=done: (part / ".lock").exists() and lines(part / "rounds.jsonl") >= done)
        running.join(pause)
        running.kill()
        running.join()
        assert running.exitcode == -signal.SIGKILL
        assert not (part / "result.json").exists()
    resumed = process(options, runs, seconds=0)
    resumed.join(60)
    assert resumed.exitcode == 0
    assert outcome(runs) == outcome(tmp_path / "whole")
    assert not list(runs.rglob("*.part"))
    assert not (part / "memory").exists()


@pytest.mark.slow
def test_kill_9_with_workers(tmp_path: Path) -> None:
    """Workers end with the process they work for, and so do the samples in the files that they share; the run goes on
    without them to the same bits.
    """
    options = small(tmp_path, REMEMBERING)
    fedshift.run(options, tmp_path / "whole")
    runs, mark = tmp_path / "runs", str(tmp_path / "mark")
    with_workers = {**options, "engine": {"name": "local", "threads": 1, "workers": 2}}
    running = process(with_workers, runs, mark, seconds=0.2)
    part = runs / "small" / "kd3a" / "a" / "seed-0"
    wait_for(lambda: lines(part / "rounds.jsonl") >= 1, 120)
    workers = processes_below(mark)
    assert len(workers) == 2
    command = (Path("/proc") / str(workers[0]) / "cmdline").read_bytes().decode().split("\0")
    shared = Path(command[command.index("fedshift.federation.local.worker") + 1]).resolve().parent
    assert list(shared.glob("*/inputs.npy"))
    running.kill()
    running.join()
    wait_for(lambda: not processes_below(mark) and not shared.exists())
    assert not (part / "result.json").exists()
    fedshift.run(options, runs)
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path, cli: Cli) -> None:
    """Code 130, a hint, no process left behind, and the same command goes on; finished runs are not touched."""
    options = experiment(
        save(tmp_path, a=images(1, 60), b=images(2, 60), c=images(3, 60)),
        protocol={"targets": ["a", "b", "c"], "seeds": [0]},
        model={"name": "mnist_cnn", "channels": [8, 16]},
    )
    options["training"]["rounds"] = 12
    file, runs, mark = write(tmp_path / "e.yaml", options), tmp_path / "runs", str(tmp_path / "mark")
    words = ("run", file, "engine.parallel_runs=2", "--runs", runs)
    running = command(*words, said=tmp_path / "said", pause=120.0, FEDSHIFT_TEST_MARK=mark)
    rounds = [runs / "small" / "fedavg" / name / "seed-0" / "rounds.jsonl" for name in "abc"]
    # Until the process, which pauses in its first run, and its helper are at work.
    wait_for(lambda: sum(lines(path) > 1 for path in rounds) >= 2 or not running.is_alive(), 120)
    left = len(processes_below(mark))
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    running.join(30)
    said = (tmp_path / "said").read_text()
    assert running.exitcode == 130, said
    assert left == 1
    assert "run the same command again" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert not processes_below(mark)
    finished = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    assert len(finished) < 3
    resumed = cli("run", file, "--runs", runs)
    assert resumed.code == 0
    assert len(re.findall(r"seed 0: [\d.]+ % \(", resumed.err)) == 3 - len(finished)  # beside lines within a run
    assert all(path.stat().st_mtime_ns == changed for path, changed in finished.items())
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_helpers_end_with_their_process(tmp_path: Path) -> None:
    """kill -9 of the first process ends those of ``parallel_runs``."""
    options = experiment(sites(tmp_path), protocol={"targets": "all", "seeds": [0]})
    options["training"]["rounds"] = 200
    runs, mark = tmp_path / "runs", str(tmp_path / "mark")
    parallel = {**options, "engine": {"name": "local", "threads": 1, "parallel_runs": 2}}
    running = process(parallel, runs, mark, seconds=1)
    # The slow one holds the first run; whoever does the second is the helper.
    wait_for(lambda: lines(runs / "small" / "fedavg" / "b" / "seed-0" / "rounds.jsonl") >= 1, 120)
    assert len(processes_below(mark)) == 1
    running.kill()
    running.join()
    wait_for(lambda: not processes_below(mark))


@pytest.mark.slow
def test_a_helper_s_error_is_the_experiment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper finds another's folder; when the experiment's own process comes there, it is gone."""
    options = experiment(sites(tmp_path), protocol={"targets": ["a", "b"], "seeds": [0]})
    options["engine"]["parallel_runs"] = 2
    path, mark = tmp_path / "runs" / "small" / "fedavg" / "b" / "seed-0" / "result.json", str(tmp_path / "mark")
    monkeypatch.setenv("FEDSHIFT_TEST_MARK", mark)

    class Damage(Reporter):
        def begin(self, runs: int) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

        def round(self, run: Run, record: RoundRecord) -> None:
            if path.exists():
                wait_for(lambda: not processes_below(mark), 120)
                path.unlink()

    with pytest.raises(UserError, match="was not written by this version"):
        fedshift.run(options, tmp_path / "runs", Damage())
    assert not path.read_text().startswith("{}"), "the other run was finished"


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol={"targets": "all", "seeds": [0, 1]})
    both = [process(options, tmp_path / "runs", seconds=0.01) for _ in range(2)]
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    fedshift.run(options, tmp_path / "whole")
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    fedshift.run(options, tmp_path / "runs")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("seed-0/*")}
    more = {**options, "protocol": {"targets": ["a", "b"], "seeds": [0], "test_fraction": 0.3}}
    results = fedshift.run(more, tmp_path / "runs")
    assert [result.target for result in results.runs] == ["a", "b"]
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items() if path.name != ".lock")


def test_a_run_goes_on_whatever_the_size_of_the_others(tmp_path: Path) -> None:
    """Bit for bit the same in any order of targets: nothing is carried from one run to the next."""
    where = save(tmp_path, a=features(1, 40), b=features(2, 9), c=features(3, 70))
    one = experiment(where, protocol={"targets": ["a", "b"], "seeds": [0]})
    other = experiment(where, protocol={"targets": ["b", "a"], "seeds": [0]})
    fedshift.run(one, tmp_path / "one")
    fedshift.run(other, tmp_path / "other")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "other")


def test_measuring_every_other_round_changes_no_weight(tmp_path: Path) -> None:
    """Rounds in between have a line without accuracy; the last is measured whatever its number."""
    where = sites(tmp_path)
    options = experiment(where, training={"rounds": 5, "batch_size": 8, "lr": 0.05})
    fedshift.run(options, tmp_path / "each")
    options["training"]["measure_every"] = 2
    fedshift.run(options, tmp_path / "second")
    part = Path("small") / "fedavg" / "a" / "seed-0"
    each, second = (
        [json.loads(line) for line in (tmp_path / runs / part / "rounds.jsonl").read_text().splitlines()]
        for runs in ("each", "second")
    )
    assert [bool(line["target_accuracy"]) for line in second] == [False, True, False, True, True]
    assert [line["losses"] for line in each] == [line["losses"] for line in second]
    assert second[-1]["target_accuracy"] == each[-1]["target_accuracy"]
    pair = [load_file(tmp_path / runs / part / "model.safetensors") for runs in ("each", "second")]
    assert all((pair[0][name] == pair[1][name]).all() for name in pair[0])


def test_the_model_handed_out_is_the_mean_of_the_last_rounds(tmp_path: Path) -> None:
    # Rounds 2 and 3 of FedAvg by two shorter runs, averaged here; training itself does not see the mean.
    def model(rounds: int, **method: Any) -> dict[str, Any]:
        options = experiment(sites(tmp_path), methods=[{**FEDAVG, **method}], model={"name": "mlp", "hidden": [4]})
        options["training"] = {**options["training"], "rounds": rounds, "lr_schedule": "constant"}
        options["protocol"] = {**options["protocol"], "seeds": [0]}
        runs = tmp_path / f"{rounds}-{len(method)}"
        fedshift.run(options, runs)
        (file, *_) = sorted(runs.glob("*/*/*/*/model.safetensors"))
        return dict(load_file(file))

    second, third = model(2), model(3)
    averaged = model(3, average_rounds=2)
    for name, tensor in averaged.items():
        np.testing.assert_allclose(tensor, (second[name].astype(np.float64) + third[name]) / 2, rtol=1e-6, atol=1e-8)
    assert any((averaged[name] != third[name]).any() for name in averaged)
    data = sites(tmp_path)

    def model(label: str, outside: int, inside: int) -> dict[str, Any]:
        method = {"name": "styles", "average_rounds": outside, "method": {**FEDAVG, "average_rounds": inside}}
        options = experiment(data, methods=[method], model={"name": "mlp", "hidden": [4]})
        options["protocol"] = {**options["protocol"], "seeds": [0]}
        fedshift.run(options, tmp_path / label)
        (file, *_) = sorted((tmp_path / label).glob("*/*/*/*/model.safetensors"))
        return dict(load_file(file))

    plain, outside, inside = model("plain", 1, 1), model("outside", 2, 1), model("inside", 1, 2)
    for name, tensor in inside.items():
        np.testing.assert_array_equal(tensor, outside[name])
    assert any((inside[name] != plain[name]).any() for name in plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP], ids=lambda one: one.name
)
def test_a_scheduler_s_signal_ends_it_after_the_round(tmp_path: Path, number: signal.Signals) -> None:
    """Code 75, the round in progress is written, and the same command ends in the same bits."""
    options = experiment(sites(tmp_path, images), model={"name": "mnist_cnn", "channels": [2, 3]})
    options["training"]["rounds"] = 6
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    running = command("run", file, "--runs", runs, said=tmp_path / "said", pause=3.0)
    rounds = runs / "small" / "fedavg" / "a" / "seed-0" / "rounds.jsonl"
    wait_for(lambda: lines(rounds) >= 3)
    os.kill(running.pid, number)
    running.join(60)
    assert running.exitcode == 75
    assert f"stopped by {number.name} after a round: run the same command again" in (tmp_path / "said").read_text()
    assert lines(rounds) == 3
    fedshift.run(options, runs)
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_a_round_that_takes_longer_than_the_grace_is_dropped(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    options["training"]["rounds"] = 6
    file = write(tmp_path / "e.yaml", options)
    running = command("run", file, "--runs", runs, said=tmp_path / "said", pause=60.0, FEDSHIFT_GRACE="0.2")
    rounds = runs / "small" / "fedavg" / "a" / "seed-0" / "rounds.jsonl"
    wait_for(lambda: lines(rounds) >= 3)
    os.kill(running.pid, signal.SIGTERM)
    running.join(30)
    assert running.exitcode == 75
    assert "took longer than 0.2 seconds" in (tmp_path / "said").read_text()
    fedshift.run(options, runs)
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_parallel_runs_end_after_their_rounds(tmp_path: Path) -> None:
    options = experiment(
        save(tmp_path, a=images(1, 60), b=images(2, 60), c=images(3, 60)),
        protocol={"targets": ["a", "b", "c"], "seeds": [0]},
        model={"name": "mnist_cnn", "channels": [8, 16]},
    )
    options["training"]["rounds"] = 40
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    running = command("run", file, "engine.parallel_runs=2", "--runs", runs, said=tmp_path / "said", pause=1.0)
    begun = lambda: [file for file in runs.rglob("rounds.jsonl") if lines(file) >= 2]  # noqa: E731
    wait_for(lambda: len(begun()) == 2, 120)
    os.kill(running.pid, signal.SIGUSR1)
    running.join(60)
    assert running.exitcode == 75
    checkpoints = list(runs.rglob("checkpoint.safetensors"))
    assert len(checkpoints) + len(list(runs.rglob("result.json"))) >= 2
    for file in checkpoints:
        _, header = read_message(file)
        assert header["round"] == lines(file.with_name("rounds.jsonl")), "no round was lost"
    options["training"]["rounds"] = 40
    fedshift.run(options, runs)
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_a_scheduler_that_tells_every_process(tmp_path: Path) -> None:
    """SLURM signals all processes of a job: helpers finish their rounds, workers wait, and the code is 75."""
    options = experiment(
        save(tmp_path, a=images(1, 60), b=images(2, 60), c=images(3, 60)),
        protocol={"targets": ["a", "b", "c"], "seeds": [0]},
        model={"name": "mnist_cnn", "channels": [8, 16]},
    )
    options["training"]["rounds"] = 40
    file, runs, mark = write(tmp_path / "e.yaml", options), tmp_path / "runs", f"mark-{tmp_path.name}"
    words = ("run", file, "engine.parallel_runs=2", "engine.workers=2", "--runs", runs)
    running = command(*words, said=tmp_path / "said", pause=1.0, FEDSHIFT_TEST_MARK=mark)
    begun = lambda: [file for file in runs.rglob("rounds.jsonl") if lines(file) >= 2]  # noqa: E731
    wait_for(lambda: len(begun()) == 2, 120)
    processes = {running.pid, *processes_below(mark)}
    assert len(processes) == 6
    for process_id in processes:
        os.kill(process_id, signal.SIGUSR2)
    running.join(60)
    assert running.exitcode == 75, (tmp_path / "said").read_text()
    checkpoints = list(runs.rglob("checkpoint.safetensors"))
    assert len(checkpoints) == 2
    for file in checkpoints:
        _, header = read_message(file)
        assert header["round"] == lines(file.with_name("rounds.jsonl")), "no round was lost"
    fedshift.run(options, runs)
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_shards_are_all_runs_once(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol={"targets": ["a", "b", "c"], "seeds": [0]})
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    assert cli("run", file, "--runs", runs, "--shard", "1/2").code == 0
    assert [path.parent.parent.name for path in sorted(runs.rglob("result.json"))] == ["a", "c"]
    assert cli("run", file, "--runs", runs, "--shard", "2/2").code == 0
    assert len(list(runs.rglob("result.json"))) == 3
    for wrong in ("0/2", "3/2", "2", "a/b", "1/0"):
        refused = cli("run", file, "--runs", runs, "--shard", wrong)
        assert refused.code == 2
        assert wrong in refused.err


def test_it_waits_for_another_process_or_takes_its_run_over(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of a machine that is gone: nobody beats. Without --wait it is found out, too."""
    monkeypatch.setenv("FEDSHIFT_SILENCE", "1")
    file, runs = write(tmp_path / "e.yaml", experiment(sites(tmp_path))), tmp_path / "runs"
    part = runs / "small" / "fedavg" / "a" / "seed-0"
    part.mkdir(parents=True)
    there = {"machine": ["server-2", "", ""], "process": 7, "start": "", "token": "t"}
    (part / ".claim-000001").write_text(json.dumps(there))
    assert cli("run", file, "--runs", runs).code == 0
    assert (part / "result.json").exists()
    assert not list(part.glob(".claim*"))


def test_a_refusal_stands_in_its_round_alone() -> None:
    warned: list[str] = []
    refused = {"a": ["a refuses numbers"]}
    log = RunLog(
        cast(Any, SimpleNamespace(reporter=SimpleNamespace(warn=warned.append))),
        cast(Any, SimpleNamespace(run=SimpleNamespace(method=SimpleNamespace(display="kd3a")))),
        cast(Any, None),
        cast(Any, SimpleNamespace(refused=refused)),
        usage=None,
    )
    rounds: list[dict[str, Any]] = [{}, {}]
    for report in rounds:
        log._report_refused(report)
    assert rounds == [{"refused": {"a": ["a refuses numbers"]}}, {}]
    assert warned == ["kd3a continues without it: a refuses numbers"]
