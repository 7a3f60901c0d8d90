"""What a network costs: start-up, seconds of an exchange, memory and idle processor time of every process.

A coordinator and three sites as processes of their own on this machine, mutual TLS over loopback:

    python benchmarks/bench_network.py [--exchanges 7]

Writes benchmarks/results/network/network.json, from which docs/flare.md quotes. The method below is what is run: it
sends weights of a given size to all sites, which send them back.

    python benchmarks/bench_network.py --many 20

has 20 sites, FedAvg, and a network of 45 MB, and writes network_20_sites.json: the largest memory that each of the
coordinator's processes had, FLARE's buffers included. It needs some 16 GB of memory. On Linux the memory of these is
the system's own mark of the largest resident memory (VmHWM), with the pages of libraries that processes share; beside
it stands the largest sum of what belongs to these processes alone (RssAnon), looked at ten times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from bench_processes import memory_of, processes, trust_module, usage
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply
from fedshift.federation.site import Site
from fedshift.methods.base import Method, State
from fedshift.weights import Weights

if TYPE_CHECKING:
    from fedshift.deploy.flare.deployment_folder import Deployment
    from fedshift.deploy.flare.provision import Provisioned

RESULTS = Path(__file__).parent / "results" / "network"
SITES = ("north", "south", "east")
TOGETHER = "coordinator's processes together, anonymous"
AIMS = {"empty": 0.25, "4 MB": 0.5, "45 MB": 3.5, "45 MB as bf16": 1.75}


@dataclass(frozen=True)
class Echoed(Reply):
    """What came."""

    weights: Weights


@dataclass(frozen=True)
class Nothing(Reply):
    """That it came."""

    number: float


class Echo(Method):
    """Sends weights to every site and has them sent back."""

    traits = Method.traits.derive(name="bench_network:Echo")

    megabytes: float = Field(0.0, description="of float32 weights, each way; 0: an empty call")
    exchanges: int = Field(1, description="in the one round")
    sleep: float = Field(0.0, description="seconds that an empty call takes")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds  # granted and never used: a run without any has no rounds

    def round(self, federation: Federation, state: State) -> State:
        whole = Weights({"payload": torch.randn(int(self.megabytes * 250_000))})
        seconds = []
        for _ in range(self.exchanges):
            begun = time.perf_counter()
            if self.megabytes:
                for _ in federation.ask(self.echo, to=federation.sources, weights=whole):
                    pass
            else:
                for _ in federation.ask(self.nothing, to=federation.sources):
                    pass
            seconds.append(time.perf_counter() - begun)
        return state.advance(state.weights, report={"seconds_of_exchanges": seconds})

    def echo(self, site: Site, weights: Weights) -> Echoed:
        """At a site: send back what came."""
        return Echoed(weights)

    def nothing(self, site: Site) -> Nothing:
        """At a site: do nothing."""
        time.sleep(self.sleep)
        return Nothing(1.0)


@contextmanager
def federation(sites: Sequence[str], methods: Sequence[str]) -> Iterator[tuple[Provisioned, dict[str, Any]]]:
    """A coordinator and its sites, connected; and how long that took."""
    import yaml

    from fedshift.deploy.flare import roles

    with tempfile.TemporaryDirectory(prefix="fedshift-bench-") as name, _clock() as provisioning:
        folder = Path(name)
        trust_module("bench_network:Echo", folder)
        project = {
            "name": "bench",
            "contact": "bench@example.org",
            "server": "localhost",
            "port": roles.free_port(),
            "sites": list(sites),
        }
        (folder / "project.yaml").write_text(yaml.safe_dump(project))
        made = roles.provision(roles.load_project(folder / "project.yaml"), folder, lambda new: None)
        provisioning.stop()
        for site in sites:
            np.savez(folder / f"{site}.npz", x=np.random.default_rng(0).normal(size=(60, 5)), y=np.arange(60) % 3)
            options = {
                "site": site,
                "data": {"name": "arrays", "sites": {site: str(folder / f"{site}.npz")}},
                "device": "cpu",
                "threads": 1,
                "policy": {"methods": list(methods), "smallest_group": 1, "exposure": 1},
            }
            (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(options))
        try:
            with _clock() as starting:
                roles.start(roles.load_kit(made.coordinator, "coordinator"))
                for site in sites:
                    roles.start(roles.load_kit(made.sites[site], "site"), made.sites[site] / "SITE.yaml", wait=0)
                while any(
                    roles.status(roles.load_kit(kit, "site")).state != "connected" for kit in made.sites.values()
                ):
                    time.sleep(0.05)
            yield made, {"provision_seconds": provisioning.seconds, "start_seconds": starting.seconds}
        finally:
            for kit in made.sites.values():
                roles.stop(roles.load_kit(kit, "site"))
            roles.stop(roles.load_kit(made.coordinator, "coordinator"))


def measure(exchanges: int) -> dict[str, Any]:
    """Everything, as it goes into the file."""
    with federation(SITES, ["bench_network:Echo"]) as (made, site_names):
        idle = usage(made.folder, 10.0)
        return site_names | {"idle": idle} | _runs(made.coordinator, made.folder, exchanges)


def measure_many(sites: int) -> dict[str, Any]:
    """Two rounds of FedAvg with a network of 45 MB: memory of the coordinator's processes, and seconds."""
    hidden = [3350, 3350]
    with federation([f"site-{number:02}" for number in range(sites)], ["fedavg"]) as (made, site_names):
        deployment, first, memory, _ = deploy(
            made.coordinator,
            made.folder,
            "many",
            {"name": "fedavg"},
            "float32",
            model={"name": "mlp", "hidden": hidden},
            rounds=2,
        )
        lines = (deployment.folder / "runs/many/fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()
        ours = {name: size for name, size in memory.items() if name.startswith("coordinator,")}
        together = {"resident": sum(ours.values()), "anonymous": memory[TOGETHER]}
        return site_names | {
            "sites": sites,
            "model_mb": 4 * sum(a * b + b for a, b in pairwise([5, *hidden, 3])) / 1e6,
            "deployed_to_first_exchange_seconds": first,
            "round_seconds": [json.loads(line)["seconds"] for line in lines],
            "coordinator_mb": ours,
            "coordinator_together_mb": together,
            "largest_site_process_mb": max(
                size for name, size in memory.items() if name not in ours and name != TOGETHER
            ),
        }


def _runs(kit: Path, folder: Path, exchanges: int) -> dict[str, Any]:
    """Exchanges of every size, and what the processes of a job use."""
    rows: dict[str, Any] = {}
    cases = (("empty", 0.0, "float32"), ("4 MB", 4.0, "float32"), ("45 MB", 45.0, "float32"))
    for label, megabytes, wire in (*cases, ("45 MB as bf16", 45.0, "bf16"), ("45 MB as int8", 45.0, "int8")):
        method = {"name": "bench_network:Echo", "label": "echo", "megabytes": megabytes, "exchanges": exchanges}
        deployment, first, memory, _ = deploy(kit, folder, label, method, wire)
        seconds = _seconds_of_exchanges(deployment)
        rows[label] = {
            "median_seconds": statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "slowest_seconds": max(seconds),
            "exchanges": len(seconds),
            "deployed_to_first_exchange_seconds": first,
            "memory_mb": memory,
        }
    waiting = {"name": "bench_network:Echo", "label": "echo", "exchanges": 1, "sleep": 25.0}
    _, _, _, used = deploy(kit, folder, "waiting", waiting, "float32", watch=10.0)
    return {"exchanges": rows, "waiting_in_a_job": used}


def _seconds_of_exchanges(deployment: Deployment) -> list[float]:
    (line,) = (deployment.folder / "runs" / deployment.name / "echo/sites/seed-0/rounds.jsonl").read_text().splitlines()
    seconds: list[float] = json.loads(line)["extra"]["seconds_of_exchanges"]
    return seconds


def deploy(
    kit: Path,
    folder: Path,
    label: str,
    method: dict[str, Any],
    wire: str,
    *,
    watch: float | None = None,
    model: Mapping[str, Any] = {"name": "linear"},
    rounds: int = 1,
    aggregation: str = "plain",
) -> tuple[Deployment, float, dict[str, int], dict[str, Any] | None]:
    """Run an experiment; the deployment, seconds until a site first answered, largest memory in MB, use if watched."""
    from fedshift.deploy.cli.deploy import follow
    from fedshift.deploy.flare.deployment_folder import ENDS, Deployment
    from fedshift.experiment.config.experiment import parse

    experiment = parse(
        {
            "name": label.replace(" ", "-"),
            "data": "sites",
            "protocol": {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3},
            "model": dict(model),
            "training": {"rounds": rounds},
            "methods": [method],
            "device": "cpu",
            "engine": {"name": "flare", "threads": 1, "wire": wire, "aggregation": aggregation, "deadline": 600},
        }
    )
    begun = time.time()
    follow(kit, experiment, folder / "runs", detach=True)
    deployment = Deployment(kit, experiment.name)
    memory: dict[str, float] = {}
    used = None
    while deployment.state["state"] not in ENDS:
        alone = 0.0
        for name, process in processes(folder):
            resident, anonymous = memory_of(process)
            memory[name] = max(memory.get(name, 0.0), resident)
            alone += anonymous if name.startswith("coordinator") else 0.0
        memory[TOGETHER] = max(memory.get(TOGETHER, 0.0), alone)
        asked = any(event.get("is") == "asked" and event.get("what") == "nothing" for event in deployment.events())
        if watch and asked and used is None:
            time.sleep(8.0)  # what a job does at its beginning is over
            used = usage(folder, watch)
        time.sleep(0.1)
    if deployment.state["state"] != "finished":
        raise SystemExit(f"{label}: {deployment.state}")
    first = next(event["time"] for event in deployment.events() if event.get("is") == "answered") - begun
    return deployment, first, {name: round(size) for name, size in sorted(memory.items())}, used


class _Clock:
    def __init__(self) -> None:
        self._begun, self.seconds = time.perf_counter(), 0.0

    def stop(self) -> None:
        self.seconds = self.seconds or time.perf_counter() - self._begun


@contextmanager
def _clock() -> Iterator[_Clock]:
    clock = _Clock()
    yield clock
    clock.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--exchanges", type=int, default=7, help="of each size")
    parser.add_argument("--many", type=int, metavar="SITES", help="measure memory with so many sites instead")
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results/network")
    arguments = parser.parse_args()
    from importlib.metadata import version

    load = os.getloadavg()[0]
    measurements = measure_many(arguments.many) if arguments.many else measure(arguments.exchanges)
    measurements["machine"] = {
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "nvflare": version("nvflare"),
        "torch": version("torch"),
    }
    out = arguments.out or RESULTS / (f"network_{arguments.many}_sites.json" if arguments.many else "network.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.many:
        out.write_text(json.dumps(measurements, indent=2) + "\n")
        print(json.dumps(measurements, indent=2))
        return
    measurements["aims_seconds"] = AIMS
    out.write_text(json.dumps(measurements, indent=2) + "\n")
    for label, row in measurements["exchanges"].items():
        print(f"{label:16} {row['median_seconds']:.3f} s (aim {AIMS.get(label, '-')})")


if __name__ == "__main__":
    main()
