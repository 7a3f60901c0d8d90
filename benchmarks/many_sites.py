"""Many sites on one machine: rounds of 100 drawn sites, sites side by side, two workers on two cores.

    python benchmarks/many_sites.py                  # all, under five minutes on two idle cores
    python benchmarks/many_sites.py rounds together  # only these

``rounds``: 100 drawn sites of 100, 1,000 and 10,000 against their arithmetic, FedAvg by PyTorch alone at 100 sites of
the same size, and the memory of further rounds. Measuring, logs and checkpoints are not in it. ``together``: whole
rounds side by side (``engine.sites``) against one site after the other, by network, sites and mini-batch. ``cores``:
two worker processes against one, for networks whose step takes more than 5 ms, and two processes of PyTorch alone
against one; on a machine that does something else, too, the share of the cores that the workers got says how far to
believe it.

What is compared takes turns, so other work of the machine meets both. ``rounds`` and ``together`` compare processor
seconds, ``cores`` wall-clock seconds. Each part writes its rows into ``results/many_sites.json``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench_common import ENDLESS, Rounds, Synthetic, Work
from bench_training import BareFedAvg
from fedshift.federation.local.allocator import keep_freed_memory
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import WorkerPool
from fedshift.methods.base import State
from fedshift.methods.rounds import play_round
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.version import installed_version

RESULT = Path(__file__).parent / "results" / "many_sites.json"
DRAWN, TURNS, LATER = 100, 5, 10
SIZES = (100, 1000, 10_000)
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # name: model, data, samples of a mini-batch
    "mlp 64, 32 on 100 numbers": ({"name": "mlp"}, {"shape": (100,), "samples": 64}, 16),
    "mnist_cnn 8, 16 / 64": (
        {"name": "mnist_cnn", "channels": [8, 16], "hidden": 64},
        {"shape": (1, 28, 28), "samples": 32},
        16,
    ),
}


def seconds(call: Callable[[], None], clock: Callable[[], float] = time.process_time) -> float:
    """What a call takes."""
    began = clock()
    call()
    return clock() - began


def in_turn(first: Callable[[], None], second: Callable[[], None], times: int) -> list[tuple[float, float]]:
    """Processor seconds of two calls that take turns."""
    return [(seconds(first), seconds(second)) for _ in range(times)]


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Rounds of drawn sites -----------------------------------------------------------------------------------------------


class Drawn:
    """Rounds of fedshift, of each of which 100 sites are drawn."""

    def __init__(self, work: Work, *, side_by_side: bool = False) -> None:
        names = [plan.name for plan in work.plans]
        budget = dict.fromkeys(names, ENDLESS)
        self.method = work.method
        self.federation = LocalFederation(
            work.plans,
            work.setting,
            side_by_side=side_by_side,
            budget=budget,
            rounds=10**6,
            per_round=min(DRAWN, len(names)),
        )
        self.state: State = self.method.start(self.federation, work.start())

    def __call__(self) -> None:
        self.state = play_round(self.method, self.federation, self.state)
        self.federation.settle()
        self.federation.ledger.settle()


def work_of(name: str, sites: int) -> Work:
    """FedAvg of one epoch at so many sites."""
    model, data, batch = NETWORKS[name]
    return Work({"name": "fedavg"}, Synthetic(sites=sites, **data), model, {"batch_size": batch, "lr": 0.01})


def rounds() -> Iterator[dict[str, Any]]:
    """Every network with every number of sites."""
    for name in NETWORKS:
        for sites in SIZES:
            began = time.process_time()
            rounds_of = Drawn(work_of(name, sites))
            started = time.process_time() - began
            few = BareFedAvg(work_of(name, min(DRAWN, sites)), torch.contiguous_format)
            rounds_of()
            few(1)
            pairs = in_turn(rounds_of, partial(few, 1), TURNS)
            before = memory()
            for _ in range(LATER):
                rounds_of()
            yield {
                "network": name,
                "sites": sites,
                "drawn": min(DRAWN, sites),
                "seconds_to_start": started,
                "milliseconds_of_a_round": 1000 * statistics.median(first for first, _ in pairs),
                "milliseconds_of_its_arithmetic": 1000 * statistics.median(other for _, other in pairs),
                "ratio": statistics.median(first / other for first, other in pairs),
                "resident_bytes": memory(),
                f"growth_in_{LATER}_rounds": memory() - before,
            }


def rounds_side_by_side() -> Iterator[dict[str, Any]]:
    """The mlp as ``engine.sites: auto`` trains it, against its arithmetic at one site after the other."""
    name = next(iter(NETWORKS))
    for sites in SIZES:
        stacked = Drawn(work_of(name, sites), side_by_side=True)
        few = BareFedAvg(work_of(name, min(DRAWN, sites)), torch.contiguous_format)
        stacked()
        few(1)
        pairs = in_turn(stacked, partial(few, 1), TURNS)
        yield {"network": name, "sites": sites, "ratio": statistics.median(first / other for first, other in pairs)}


# Side by side --------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Cuts numbers into 16 tokens, and gives the mean of two layers of attention over them."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs // 16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        read: Tensor = self.layers(self.first(inputs.view(len(inputs), 16, -1)))
        return read.mean(1)


class Blocks(NetworkOptions):
    """Networks that do not come with fedshift: linear layers with LayerNorm and GELU, or attention."""

    name: Literal["blocks"] = "blocks"
    width: int
    attention: bool = False

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        (inputs,), width = input_shape, self.width
        parts: list[nn.Module] = [Attends(inputs, width)]
        if not self.attention:
            halves = ((inputs, width), (width, width))
            parts = [nn.Sequential(nn.Linear(read, gives), nn.LayerNorm(gives), nn.GELU()) for read, gives in halves]
        layers = OrderedDict((f"part{number}", part) for number, part in enumerate(parts))
        stages = {name: f"features.{name}" for name in layers}
        features, last = nn.Sequential(layers), nn.Linear(width, classes)
        return Network(
            features, last, embedding_size=width, classes=classes, stages=stages, alignment_stages=list(stages)
        )


STACKS: dict[str, tuple[tuple[int, ...], Any]] = {
    # name: shape of a sample, model
    "linear, 100 numbers": ((100,), {"name": "linear"}),
    "mlp 64, 32, 100 numbers": ((100,), {"name": "mlp"}),
    "mlp 256, 1280 numbers": ((1280,), {"name": "mlp", "hidden": [256]}),
    "LayerNorm and GELU 64, 128 numbers": ((128,), Blocks(width=64)),
    "LayerNorm and GELU 512, 128 numbers": ((128,), Blocks(width=512)),
    "attention 32, 128 numbers": ((128,), Blocks(width=32, attention=True)),
    "attention 128, 128 numbers": ((128,), Blocks(width=128, attention=True)),
    "mnist_cnn 8, 16 / 64": ((1, 28, 28), {"name": "mnist_cnn", "channels": [8, 16], "hidden": 64}),
    "mnist_cnn 16, 32 / 128": ((1, 28, 28), {"name": "mnist_cnn"}),
}
STACK_SITES, STACK_BATCHES = (4, 32), (8, 64)


def together() -> Iterator[dict[str, Any]]:
    """Whole rounds of FedAvg, two mini-batches at each site."""
    for name, (shape, model) in STACKS.items():
        for sites in STACK_SITES:
            for batch in STACK_BATCHES:
                data = Synthetic(shape=shape, samples=2 * batch, sites=sites, classes=7)
                work = Work({"name": "fedavg"}, data, model, {"batch_size": batch, "lr": 0.01})
                alone, side = Rounds(work), Rounds(work, side_by_side=True)
                alone(1)
                side(1)
                unlike = max(
                    float((side.state.weights[key] - value).abs().max()) for key, value in alone.state.weights.items()
                )
                pairs = in_turn(partial(alone, 1), partial(side, 1), 3)
                yield {
                    "network": name,
                    "weights": sum(value.numel() for value in alone.state.weights.values()),
                    "sites": sites,
                    "mini_batch": batch,
                    "milliseconds_of_a_step": 1000 * statistics.median(first for first, _ in pairs) / (2 * sites),
                    "side_by_side": 1000 * statistics.median(other for _, other in pairs) / (2 * sites),
                    "ratio": statistics.median(first / other for first, other in pairs),
                    "difference_of_weights_after_a_round": unlike,
                }


# Cores ---------------------------------------------------------------------------------------------------------------

WORKERS, SITES_OF_CORES = 2, 8
HEAVY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mnist_cnn 32, 64 / 512": ((1, 28, 28), {"name": "mnist_cnn", "channels": [32, 64], "hidden": 512}),
    "resnet18, 32 px": ((3, 32, 32), {"name": "resnet18"}),
}


def children() -> float:
    """Processor seconds of this process and of the workers that it started."""
    import psutil

    this_process = psutil.Process()
    return float(
        sum(sum(process.cpu_times()[:2]) for process in (this_process, *this_process.children(recursive=True)))
    )


def heavy(name: str, sites: int) -> Work:
    """FedAvg of one epoch, four mini-batches, at so many sites."""
    shape, model = HEAVY[name]
    return Work({"name": "fedavg"}, Synthetic(shape=shape, samples=256, sites=sites), model, {"batch_size": 64})


def plain(connection: Connection, name: str, sites: int) -> None:
    """A process of PyTorch alone: a round for each message, until the other end is closed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    loop = BareFedAvg(heavy(name, sites), torch.contiguous_format)
    with suppress(EOFError):
        while True:
            connection.send(None)
            connection.recv()
            loop(1)


class Plain:
    """Processes of PyTorch alone that share the sites and exchange nothing: what this machine gives so many."""

    def __init__(self, name: str, processes: int) -> None:
        start = get_context("spawn")
        self._ends = []
        for _ in range(processes):
            here, there = start.Pipe()
            start.Process(target=plain, args=(there, name, SITES_OF_CORES // processes), daemon=True).start()
            there.close()
            self._ends.append(here)
        self._wait()

    def _wait(self) -> None:
        for end in self._ends:
            end.recv()

    def __call__(self, rounds: int) -> None:
        for _ in range(rounds):
            for end in self._ends:
                end.send(None)
            self._wait()

    def close(self) -> None:
        for end in self._ends:
            end.close()


def cores() -> Iterator[dict[str, Any]]:
    """Eight equal sites; a round in this process, and over two workers; the same by PyTorch alone."""
    for name in HEAVY:
        work = heavy(name, SITES_OF_CORES)
        with (
            closing(WorkerPool(WORKERS, 1)) as pool,
            closing(Plain(name, 1)) as lone,
            closing(Plain(name, WORKERS)) as both,
        ):
            blocks: dict[str, Callable[[int], None]] = {
                "alone": Rounds(work),
                "shared": Rounds(work, pool),
                "lone": lone,
                "both": both,
            }
            for block in blocks.values():
                block(1)
            walls, processor = [], []
            for _ in range(TURNS):
                wall, took = {}, {}
                for key, block in blocks.items():
                    before = children()
                    wall[key] = seconds(partial(block, 1), time.perf_counter)
                    took[key] = children() - before
                walls.append(wall)
                processor.append(took)
        gains = [wall["alone"] / wall["shared"] / WORKERS for wall in walls]
        yield {
            "network": name,
            "milliseconds_of_a_step": 1000 * statistics.median(wall["alone"] for wall in walls) / (SITES_OF_CORES * 4),
            "workers": WORKERS,
            "speed_up_per_core": statistics.median(gains),
            "best": max(gains),
            "speed_up_per_core_of_pytorch_alone": statistics.median(w["lone"] / w["both"] / WORKERS for w in walls),
            "processor_seconds_beside_one_process": statistics.median(p["shared"] / p["alone"] for p in processor),
            "cores_that_the_workers_got": statistics.median(
                took["shared"] / wall["shared"] for took, wall in zip(processor, walls, strict=True)
            ),
        }


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "rounds": rounds,
    "rounds_side_by_side": rounds_side_by_side,
    "together": together,
    "cores": cores,
}


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    for part in sys.argv[1:] or PARTS:
        began, rows = time.perf_counter(), []
        for row in PARTS[part]():
            rows.append(row)
            print(
                *(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
            )
        results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        results[part] = {
            "command": f"python benchmarks/many_sites.py {part}",
            "versions": {
                "fedshift": installed_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "seconds": time.perf_counter() - began,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
