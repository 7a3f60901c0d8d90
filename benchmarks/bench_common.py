"""What the parts of `bench.py` share: a method set up as `fedshift run` does, its rounds, clocks for blocks in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from fedshift.data.domain import DataSet, DataSource, Domain, Preprocessing
from fedshift.data.domain import Manifest as DataManifest
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import site_plans
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation, WorkerPool
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.methods.base import Method, State
from fedshift.methods.rounds import start_run
from fedshift.weights import Weights

Row = dict[str, Any]
Seconds = tuple[float, float]
"""Wall-clock and processor seconds of this process."""

ENDLESS = 10**9


class Synthetic(DataSource):
    """Random samples: the time of a mini-batch does not depend on what is in it. One site more than is trained on."""

    name: Literal["synthetic"] = "synthetic"
    shape: tuple[int, ...]
    samples: int = 512
    sites: int = 4
    classes: int = 10
    masks: bool = False

    def build(self) -> DataSet:
        draw = np.random.default_rng(0)
        images = len(self.shape) == 3
        size = (self.samples, *self.shape)
        labels = (np.arange(self.samples) % self.classes).astype(np.int64)
        masks = None
        if self.masks:
            labels = np.zeros(self.samples, dtype=np.int64)
            masks = draw.integers(0, 2, (self.samples, self.classes, *self.shape[1:]), dtype=np.uint8)
        domains = {
            name: Domain(
                name,
                draw.integers(0, 256, size, dtype=np.uint8) if images else draw.standard_normal(size, dtype=np.float32),
                labels,
                masks=masks,
            )
            for name in ("unseen", *(f"site{number}" for number in range(self.sites)))
        }
        classes = tuple(str(label) for label in range(self.classes))
        preprocessing = Preprocessing(kind="image" if images else "features")
        return DataSet(self.name, domains, classes, preprocessing, DataManifest("", "", "", "", ""))


class Work:
    """One method of an experiment as `fedshift run` would set it up: sites, setting and common start."""

    def __init__(
        self,
        method: Mapping[str, Any],
        data: DataSource | Mapping[str, Any],
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        device: str = "cpu",
        protocol: Mapping[str, Any] | None = None,
        target: str | None = None,
    ) -> None:
        self.experiment = parse(
            {
                "name": "bench",
                "data": data,
                "protocol": protocol or {"seeds": [0], "test_fraction": 0.0, "base_images": "shared"},
                "model": model,
                "training": training,
                "methods": [method],
                "device": device,
            }
        )
        self.data = self.experiment.data.build()
        self.method: Method = self.experiment.methods[0]
        split = self.experiment.protocol.split_of(self.data, target or next(iter(self.data.domains)), 0)
        self.plans: list[SitePlan] = site_plans(self.method, self.data, split)
        self.setting = Setting(
            method=self.method,
            training=self.experiment.training,
            network=self.experiment.model,
            preprocessing=self.data.preprocessing,
            input_shape=self.data.input_shape,
            classes=len(self.data.classes),
            sources=len(split.train),
            seed=0,
            device=device,
        )

    def start(self) -> Weights:
        """The common start."""
        return Weights(self.setting.build_network().state_dict())

    def federation(self, pool: WorkerPool | None = None, *, side_by_side: bool = False) -> Federation:
        """The sites in this process, or in a pool's."""
        options: dict[str, Any] = {"budget": dict.fromkeys((plan.name for plan in self.plans), ENDLESS), "rounds": 1}
        if pool is None:
            return LocalFederation(self.plans, self.setting, side_by_side=side_by_side, **options)
        return PoolFederation(pool, self.plans, self.setting, **options)


class Rounds:
    """Goes on with a method's rounds at every call."""

    def __init__(
        self, work: Work, pool: WorkerPool | None = None, threads: int = 1, *, side_by_side: bool = False
    ) -> None:
        self.method, self.threads = work.method, threads
        self.federation = work.federation(pool, side_by_side=side_by_side)
        self.state: State = start_run(self.method, self.federation, work.start())

    def __call__(self, rounds: int) -> None:
        torch.set_num_threads(self.threads)
        for _ in range(rounds):
            self.federation.round = self.state.round + 1
            self.state = self.method.round(self.federation, self.state)

    @property
    def mini_batches(self) -> int:
        """Mini-batches of all sites since the beginning."""
        return sum(self.federation.progress.used.values())


def time_block(block: Callable[[int], None], rounds: int, device: str = "cpu") -> Seconds:
    """How long ``rounds`` of ``block`` take."""
    wall, processor = time.perf_counter(), time.process_time()
    block(rounds)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor


def time_in_turn(
    blocks: Mapping[str, Callable[[int], None]], seconds: float, repeats: int, device: str = "cpu"
) -> dict[str, list[Seconds]]:
    """Seconds of one round of every block: A B C A B C …, so that all see the same machine, whatever else it does.

    Blocks have run before. Each turn takes about ``seconds``, or one round.
    """
    rounds = {name: max(1, round(seconds / time_block(block, 1, device)[0])) for name, block in blocks.items()}
    seconds_of: dict[str, list[Seconds]] = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, block in blocks.items():
            wall, processor = time_block(block, rounds[name], device)
            seconds_of[name].append((wall / rounds[name], processor / rounds[name]))
    return seconds_of


def median(samples: Sequence[Seconds], clock: int = 0) -> float:
    """Median of the wall-clock (0) or processor (1) seconds."""
    return statistics.median(sample[clock] for sample in samples)


def median_ratio(numerator: Sequence[Seconds], denominator: Sequence[Seconds], clock: int = 0) -> float:
    """Median over the repeats of the ratio within a repeat."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(numerator, denominator, strict=True))
