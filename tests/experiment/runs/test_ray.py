"""Runs and sites in a cluster of Ray: three nodes of this machine, with cards that are not there.

One process is the evidence: every model has its bits. What Ray itself says of its nodes and cards is the other one.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from safetensors.numpy import load_file
from small import experiment, sites

from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.local import ray_cluster

pytestmark = pytest.mark.slow
LONG: dict[str, Any] = {"rounds": 15, "batch_size": 8, "lr": 0.05}
CARDS = 2
MANY: dict[str, Any] = {
    "protocol": {"kind": "leave_one_out", "seeds": [*range(8)]},
    "methods": [{"name": "fedavg"}, {"name": "fedprox"}],
}
"""Forty-eight runs."""


def ports() -> dict[str, int]:
    """Free ports for a node's agents. A node that chooses them itself gives up after 15 seconds on a busy machine."""
    names = ("runtime_env_agent_port", "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    with ExitStack() as held:
        listening = [held.enter_context(socket.socket()) for _ in names]
        for one in listening:
            one.bind(("", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, listening, strict=True)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room and three nodes of one core and two cards each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ray_cluster.USAGE, "0")
        lean = {"include_log_monitor": False, "include_dashboard": False}
        head = {"num_cpus": 0, "no_monitor": True, **lean, **ports()}
        try:
            started = Cluster(initialize_head=True, head_node_args=head)
            started.nodes = [started.add_node(num_cpus=1, num_gpus=CARDS, **lean, **ports()) for _ in range(3)]
            started.wait_for_nodes()
        except Exception as error:  # Ray's class is Exception itself
            if "timed out during startup" not in str(error):
                raise
            pytest.skip("a node of Ray has 15 seconds to start, which this machine is too busy for")
        yield started
        started.shutdown()


def small(folder: Path, engine: dict[str, Any], **changes: Any) -> Any:
    where = sites(folder / "data")
    options = {"device": "cpu", "training": LONG, "protocol": {"kind": "leave_one_out", "seeds": [0, 1]}} | changes
    return parse(experiment(where, engine=engine, **options))


def models(folder: Path) -> dict[str, Any]:
    return {str(file.relative_to(folder)): load_file(file) for file in sorted(folder.rglob("model.safetensors"))}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for tensor, values in tensors.items():
            assert found[name][tensor].tobytes() == values.tobytes(), f"{tensor} of {name}"


def asleep(seconds: float) -> None:
    time.sleep(seconds)


class Removes(Reporter):
    """Takes a node away as soon as the first run is finished, and counts what is finished."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.finished_runs = cluster, list[Run]()

    def on_finished(self, run: Run, result: RunResult, resumed: bool) -> None:
        if not self.finished_runs:
            self.cluster.remove_node(self.cluster.nodes.pop(), allow_graceful=False)
        self.finished_runs.append(run)


def test_runs_and_sites_in_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """Sites as actors, more cards than there are, silence, and last of all 48 runs of which one node is lost."""
    alone = small(tmp_path, {"name": "local", "threads": 1}, **MANY)
    many = models(run_experiment(alone, tmp_path / "alone"))
    assert len(many) == 48
    expected = {name: model for name, model in many.items() if re.match(r"fedavg/\w+/seed-[01]/", name)}
    there = {"name": "ray", "address": cluster.address, "cards": 0.5, "wait": 120}

    with pytest.raises(UserError, match=r"9 process\(es\) .* have no room in the cluster of 3 cores and 6 cards"):
        run_experiment(small(tmp_path, there | {"parallel_runs": 9}), tmp_path / "many")

    acting = run_experiment(small(tmp_path, there | {"workers": 2, "cards": 1}), tmp_path / "actors")
    same(models(acting), expected)
    assert not list(acting.glob(".ray-*"))

    with ray_cluster.join_cluster(cluster.address) as ray:
        began = time.monotonic()
        with pytest.raises(FedshiftError, match=r"within 0\.2 seconds \(engine\.wait\)"):
            ray_cluster.wait_for(ray, [ray.remote(asleep).options(num_cpus=1).remote(3)], 0.2)
        assert time.monotonic() - began < 3

    seen = Removes(cluster)
    spread = run_experiment(small(tmp_path, there, **MANY), tmp_path / "runs", seen)
    same(models(spread), many)
    assert len(seen.finished_runs) == len(set(map(str, seen.finished_runs))) == len(many)
    for rounds in spread.rglob("rounds.jsonl"):
        numbers = [json.loads(line)["round"] for line in rounds.read_text().splitlines()]
        assert numbers == [*range(1, LONG["rounds"] + 1)]  # none twice


def test_without_the_package_it_is_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps(experiment(sites(tmp_path / "data"), engine={"name": "ray"})))
    done = cli("run", str(file), "--runs", str(tmp_path / "runs"))
    assert done.code == 2
    assert "engine.name: ray needs the package ray: pip install 'fedshift[ray]'" in done.err


def test_workers_and_parallel_runs_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave one of them out"):
        small(tmp_path, {"name": "ray", "workers": 2, "parallel_runs": 2})


def test_an_address_where_nothing_answers_is_one_line(cli: Cli, tmp_path: Path) -> None:
    """Ray itself tries such an address for minutes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        file = tmp_path / "e.yaml"
        file.write_text(json.dumps(experiment(sites(tmp_path / "data"), engine={"name": "ray", "address": address})))
        done = cli("run", str(file), "--runs", str(tmp_path / "runs"))
    assert done.code == 2
    assert f"engine.address: nothing answers at {address}" in done.err
