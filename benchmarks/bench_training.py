"""The parts of `bench.py` that train: the engine against a bare loop, workers against threads, CSAC and ELCFS against
FedAvg, an epoch of KD3A against a bare loop.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.domain import DataSet, DataSource, Domain, Preprocessing, SparseRows
from fedshift.data.domain import Manifest as DataManifest
from fedshift.data.transforms import to_network
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import site_plans
from fedshift.experiment.protocol import split_of
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation, WorkerPool
from fedshift.federation.messages import Reply
from fedshift.federation.randomness import generator
from fedshift.federation.site import Batch, Envelope
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner
from fedshift.functional.consensus_focus import shapley_focus
from fedshift.functional.knowledge_vote import distillation_loss, knowledge_vote
from fedshift.functional.projection import projection_layer
from fedshift.functional.source_weights import domain_weights
from fedshift.methods.base import Method, State
from fedshift.methods.federated.elcfs import SharedSpectra
from fedshift.models.payload import forward_cost
from fedshift.weights import Weights

Row = dict[str, Any]
Seconds = tuple[float, float]
"""Wall-clock and processor seconds of this process."""

ENDLESS = 10**9
SETTINGS = ("acquisition", 30), ("calibration", 40 * 5)
"""CSAC on Rotated MNIST: epochs of local acquisition, and of calibration in 40 rounds of 5."""


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
        split = split_of(self.experiment.protocol, self.data, target or next(iter(self.data.domains)), 0)
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

    def federation(self, pool: WorkerPool | None = None) -> Federation:
        """The sites in this process, or in a pool's."""
        options: dict[str, Any] = {"budget": dict.fromkeys((plan.name for plan in self.plans), ENDLESS), "rounds": 1}
        if pool is None:
            return LocalFederation(self.plans, self.setting, **options)
        return PoolFederation(pool, self.plans, self.setting, **options)


class Rounds:
    """Goes on with a method's rounds at every call."""

    def __init__(self, work: Work, pool: WorkerPool | None = None, threads: int = 1) -> None:
        self.method, self.threads = work.method, threads
        self.federation = work.federation(pool)
        self.state: State = self.method.start(self.federation, work.start())

    def __call__(self, rounds: int) -> None:
        torch.set_num_threads(self.threads)
        for _ in range(rounds):
            self.federation.round = self.state.round + 1
            self.state = self.method.round(self.federation, self.state)

    @property
    def mini_batches(self) -> int:
        """Mini-batches of all sites since the beginning."""
        return sum(self.federation.progress.used.values())


def timed(block: Callable[[int], None], rounds: int, device: str = "cpu") -> Seconds:
    """How long ``rounds`` of ``block`` take."""
    wall, processor = time.perf_counter(), time.process_time()
    block(rounds)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor


def interleaved(
    blocks: Mapping[str, Callable[[int], None]], seconds: float, repeats: int, device: str = "cpu"
) -> dict[str, list[Seconds]]:
    """Seconds of one round of every block: A B C A B C …, so that all see the same machine, whatever else it does.

    Blocks have run before. Each turn takes about ``seconds``, or one round.
    """
    rounds = {name: max(1, round(seconds / timed(block, 1, device)[0])) for name, block in blocks.items()}
    found: dict[str, list[Seconds]] = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, block in blocks.items():
            wall, processor = timed(block, rounds[name], device)
            found[name].append((wall / rounds[name], processor / rounds[name]))
    return found


def median(samples: Sequence[Seconds], clock: int = 0) -> float:
    """Median of the wall-clock (0) or processor (1) seconds."""
    return statistics.median(sample[clock] for sample in samples)


def paired(numerator: Sequence[Seconds], denominator: Sequence[Seconds], clock: int = 0) -> float:
    """Median over the repeats of the ratio within a repeat."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(numerator, denominator, strict=True))


# Engine ----------------------------------------------------------------------------------------------------


class BareFedAvg:
    """FedAvg as one would write it with PyTorch alone, on the very batches that fedshift draws."""

    def __init__(self, work: Work, layout: torch.memory_format) -> None:
        device, training = work.setting.device, work.setting.training
        self.lr, self.momentum, self.batch_size = training.lr, training.momentum, training.batch_size
        self.network = work.setting.build_network().to(device).to(memory_format=layout).train()
        self.sites: dict[str, tuple[Tensor, Tensor]] = {}
        for plan in work.plans:
            ((domain, rows, _),) = plan.parts
            assert isinstance(domain.inputs, np.ndarray)
            images = to_network(torch.from_numpy(domain.inputs[rows]), work.setting.preprocessing, device)
            labels = torch.from_numpy(domain.labels[rows]).to(device)
            self.sites[plan.name] = images.contiguous(memory_format=layout), labels
        self.exchange = 0

    def __call__(self, rounds: int) -> None:
        torch.set_num_threads(1)
        for _ in range(rounds):
            self.exchange += 1
            states, sizes = [], []
            for name, (images, labels) in self.sites.items():
                model = copy.deepcopy(self.network)
                optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
                order = torch.randperm(len(labels), generator=generator(0, name, self.exchange, "batches"))
                for rows in torch.split(order.to(labels.device), self.batch_size):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images[rows]), labels[rows])
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                states.append(model.state_dict())
                sizes.append(len(labels))
            shares = [size / sum(sizes) for size in sizes]
            mean = {
                key: torch.stack([state[key] * share for state, share in zip(states, shares, strict=True)]).sum(0)
                for key in states[0]
            }
            self.network.load_state_dict(mean)


def engine(quick: bool, device: str) -> list[Row]:
    """fedshift's FedAvg and a bare loop, one thread; ``difference`` shows that both did the same work."""
    data = {"name": "rotated_mnist" if os.environ.get("FEDSHIFT_DATA") else "rotated_digits"}
    training = {"batch_size": 64, "optimizer": "sgd", "lr": 0.01, "momentum": 0.5}
    work = Work({"name": "fedavg", "local_epochs": 1}, data, {"name": "mnist_cnn"}, training, device)
    ours = Rounds(work)
    bare = {
        "channels last": BareFedAvg(work, torch.channels_last),
        "default layout": BareFedAvg(work, torch.contiguous_format),
    }
    blocks: dict[str, Callable[[int], None]] = {"fedshift": ours, **bare}
    for block in blocks.values():
        block(1)
    trained = ours.state.weights
    difference = {
        name: max(
            (trained[key].cpu() - tensor.cpu()).abs().max().item() for key, tensor in loop.network.state_dict().items()
        )
        for name, loop in bare.items()
    }
    seconds = interleaved(blocks, 0.5 if quick else 1.2, 5 if quick else 11, device)
    images = sum(len(rows) for plan in work.plans for _, rows, _ in plan.parts)
    return [
        {
            "data": data["name"],
            "bare_loop": name,
            "fedshift_images_per_second": images / median(seconds["fedshift"]),
            "bare_images_per_second": images / median(seconds[name]),
            "ratio": paired(seconds[name], seconds["fedshift"]),
            "ratio_of_processor_seconds": paired(seconds[name], seconds["fedshift"], clock=1),
            "difference_of_weights_after_a_round": difference[name],
            "device": device,
        }
        for name in bare
    ]


# Workers ----------------------------------------------------------------------------------------------------

WORKER_MODELS: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mnist_cnn 16, 32 / 128": ((1, 28, 28), {"name": "mnist_cnn"}),
    "mnist_cnn 32, 64 / 512": ((1, 28, 28), {"name": "mnist_cnn", "channels": [32, 64], "hidden": 512}),
    "mlp 64, 32 on 1280 features": ((1280,), {"name": "mlp"}),
}


class Both:
    """Two runs at the same time, each with a worker process of its own, as with ``parallel_runs: 2``."""

    def __init__(self, runs: Sequence[Rounds]) -> None:
        self.runs = runs
        self.pool = ThreadPoolExecutor(len(runs))

    def __call__(self, rounds: int) -> None:
        list(self.pool.map(lambda run: run(rounds), self.runs))


def workers(quick: bool) -> list[Row]:
    """One worker of one thread against two workers, two threads and two runs. Four equal sites, one epoch a round."""
    found = []
    pools = WorkerPool(2, 1), WorkerPool(1, 1), WorkerPool(1, 1)
    try:
        for name, (shape, model) in WORKER_MODELS.items():
            data = Synthetic(shape=shape, samples=512 if len(shape) == 3 else 4096)
            work = Work({"name": "fedavg", "local_epochs": 1}, data, model, {"batch_size": 64})
            one, two_workers, two_threads = Rounds(work), Rounds(work, pools[0]), Rounds(work, threads=2)
            both = Both([Rounds(work, pool) for pool in pools[1:]])
            blocks: dict[str, Callable[[int], None]] = {
                "one": one,
                "workers": two_workers,
                "threads": two_threads,
                "runs": both,
            }
            for block in blocks.values():
                block(1)
            mini_batches = one.mini_batches
            seconds = interleaved(blocks, 0.4 if quick else 1.2, 3 if quick else 7)
            gains = {
                "two_workers": paired(seconds["one"], seconds["workers"]),
                "two_threads": paired(seconds["one"], seconds["threads"]),
                "two_runs": 2 * paired(seconds["one"], seconds["runs"]),
            }
            found.append(
                {
                    "model": name,
                    "mini_batches_per_second_one_worker": mini_batches / median(seconds["one"]),
                    **gains,
                    "winner_of_one_run": "workers" if gains["two_workers"] > gains["two_threads"] else "threads",
                    # Any number of workers gives the same weights; so must a bench that claims equal work.
                    "same_weights": one_round(work, None) == one_round(work, pools[0]),
                }
            )
            both.pool.shutdown()
    finally:
        torch.set_num_threads(1)
        for pool in pools:
            pool.close()
    return found


def one_round(work: Work, pool: WorkerPool | None) -> Weights:
    """The weights after the first round."""
    run = Rounds(work, pool)
    run(1)
    return run.state.weights


# KD3A ------------------------------------------------------------------------------------------------------------


class BareKD3A:
    """An epoch of KD3A as one would write it with PyTorch alone: dense batches from memory, all teachers asked once."""

    def __init__(self, work: Work) -> None:
        self.training, self.gate = work.setting.training, 0.9
        self.network = work.setting.build_network().train()
        self.sites: dict[str, tuple[Tensor, Tensor]] = {}
        for plan in work.plans:
            ((domain, rows, _),) = plan.parts
            inputs = domain.inputs.dense(rows) if isinstance(domain.inputs, SparseRows) else domain.inputs[rows]
            self.sites[plan.name] = torch.from_numpy(inputs).float(), torch.from_numpy(domain.labels[rows])
        (self.target,) = (plan.name for plan in work.plans if plan.role == "target")
        self.exchange = 0

    def _trained(self, name: str, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
        model = copy.deepcopy(self.network)
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=self.training.lr,
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            fused=True,
        )
        order = torch.randperm(len(self.sites[name][1]), generator=generator(0, name, self.exchange, "batches"))
        for rows in torch.split(order, self.training.batch_size):
            optimizer.zero_grad()
            loss_of(model, rows).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model

    def __call__(self, rounds: int) -> None:
        torch.set_num_threads(1)
        for _ in range(rounds):
            self.exchange += 1
            sources = [name for name in self.sites if name != self.target]
            models = []
            for name in sources:
                inputs, labels = self.sites[name]

                def supervised(
                    model: nn.Module, rows: Tensor, inputs: Tensor = inputs, labels: Tensor = labels
                ) -> Tensor:
                    return F.cross_entropy(model(inputs[rows]), labels[rows])

                models.append(self._trained(name, supervised))
            self.exchange += 1
            inputs, _ = self.sites[self.target]
            with torch.no_grad():
                said = torch.stack(
                    [torch.cat([model(part).softmax(1) for part in torch.split(inputs, 500)]) for model in models]
                )

            def distilled(model: nn.Module, rows: Tensor, inputs: Tensor = inputs, said: Tensor = said) -> Tensor:
                consensus = knowledge_vote(said[:, rows], self.gate)
                return distillation_loss(model(inputs[rows]), consensus.probabilities, consensus.support)

            models.append(self._trained(self.target, distilled))
            sizes = [len(self.sites[name][1]) for name in sources]
            shares, own = domain_weights(shapley_focus(said, self.gate), sizes, len(inputs))
            states = [model.state_dict() for model in models]
            self.network.load_state_dict(
                {
                    key: sum(state[key] * share for state, share in zip(states, [*shares, own], strict=True))
                    for key in states[0]
                }
            )


def kd3a(quick: bool) -> list[Row]:
    """Seconds of an epoch on Amazon Review, one thread, and of a bare loop; no row without the data."""
    if not os.environ.get("FEDSHIFT_DATA"):
        return []
    training = {
        "batch_size": 50,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "reset_optimizer_each_round": True,
    }
    work = Work(
        {"name": "kd3a", "mixup": 0},  # which the bare loop leaves out
        {"name": "amazon_reviews", "scaling": "raw"},
        {"name": "mlp", "hidden": [1000, 500, 100]},
        training,
        protocol={"kind": "adapt_to_one", "targets": ["kitchen"], "seeds": [0]},
    )
    ours, bare = Rounds(work), BareKD3A(work)
    blocks: dict[str, Callable[[int], None]] = {"fedshift": ours, "bare": bare}
    for block in blocks.values():
        block(1)
    network = bare.network.state_dict()
    difference = max((ours.state.weights[key] - tensor).abs().max().item() for key, tensor in network.items())
    seconds = interleaved(blocks, 1.0, 3 if quick else 7)
    return [
        {
            "data": "amazon_reviews",
            "mini_batches": sum(-(-len(rows) // 50) for plan in work.plans for _, rows, _ in plan.parts),
            "fedshift_seconds_per_epoch": median(seconds["fedshift"]),
            "bare_seconds_per_epoch": median(seconds["bare"]),
            "ratio": paired(seconds["bare"], seconds["fedshift"]),
            "ratio_of_processor_seconds": paired(seconds["bare"], seconds["fedshift"], clock=1),
            "difference_of_weights_after_a_round": difference,
        }
    ]


# MDFNet ----------------------------------------------------------------------------------------------------------


def mdfnet(quick: bool) -> list[Row]:
    """Seconds of 100 rounds on the cached features of 5,000 images, a labelled and an unlabelled site, two workers."""
    rows: list[Row] = []
    with closing(WorkerPool(2, 1)) as pool:
        for features, products in itertools.product((1280, 2048), ("default", "onednn")):
            work = Work(
                {"name": "mdfnet"},
                Synthetic(shape=(features,), samples=3334, sites=1, classes=12),
                {"name": "mlp", "hidden": [512, 128]},
                {
                    "batch_size": 64,
                    "lr": 0.01,
                    "momentum": 0.9,
                    "reset_optimizer_each_round": False,
                    "matrix_products": products,
                },
                protocol={"kind": "source_target", "pairs": [["site0", "unseen"]], "splits": 1},
                target="site0-unseen",
            )
            run = Rounds(work, pool)
            run(1)
            before, rounds = run.mini_batches, 10 if quick else 100
            seconds = timed(run, rounds)[0]
            rows.append(
                {
                    "features": features,
                    "matrix_products": products,
                    "images": sum(len(rows) for plan in work.plans for _, rows, _ in plan.parts),
                    "rounds": rounds,
                    "mini_batches": run.mini_batches - before,
                    "seconds_per_100_rounds": 100 * seconds / rounds,
                }
            )
    return rows


# CSAC ----------------------------------------------------------------------------------------------------

_RESNET: dict[str, Any] = {"name": "resnet18", "bottleneck": 256}
CSAC_CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], int, int]] = {
    # name: shape of a sample, model, training, samples of the site, mini-batches at a stretch
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 48),
    "mlp 64, 32 on 1280 features": ((1280,), {"name": "mlp"}, {"batch_size": 32}, 1600, 200),
    "resnet18, 64 px": ((3, 64, 64), _RESNET, {"batch_size": 32}, 96, 3),
    "resnet18, 64 px, augmented": ((3, 64, 64), _RESNET, {"batch_size": 32, "augmentation": "csac"}, 96, 3),
}


class LocalSteps:
    """One site and one step of a method; every call trains on and notes the time of every mini-batch."""

    def __init__(self, work: Work, step: str) -> None:
        self.step, self.device = step, work.setting.device
        self.runner = SiteRunner(work.plans[0], work.setting)
        self.content: dict[str, Any] = {} if step == "acquire" else {"weights": work.start()}
        self.exchange = 0
        self.seconds: list[Seconds] = []
        self._draw = self.runner.site.batches
        self.runner.site.batches = self._noted  # type: ignore[method-assign]

    def _clock(self) -> Seconds:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _noted(self, epochs: int = 1, steps: int | None = None) -> Iterator[Batch]:
        began = self._clock()
        for batch in self._draw(epochs, steps):
            yield batch
            now = self._clock()  # the training step on this batch is over
            self.seconds.append((now[0] - began[0], now[1] - began[1]))
            began = now

    def run(self, step: str, content: Mapping[str, Any] | None = None) -> Reply:
        """Run a step, with the content that belongs to the timed one unless other content is given."""
        self.exchange += 1
        if content is None:
            content = self.content if step == self.step else {}
        return self.runner.run(step, Envelope(self.exchange, self.exchange, 0.0, ENDLESS), content)[0]

    def __call__(self) -> None:
        self.run(self.step)


def csac(quick: bool, device: str) -> list[Row]:
    """Seconds of a local mini-batch of FedAvg and of both phases of CSAC, in turn, at one site with one thread."""
    torch.set_num_threads(1)
    found = []
    for name, (shape, model, training, samples, steps) in CSAC_CASES.items():
        data = Synthetic(shape=shape, samples=samples, sites=1)
        fedavg = Work({"name": "fedavg", "steps_per_round": steps}, data, model, training, device)
        method = {"name": "csac", "acquisition_steps": steps, "calibration_steps": steps}
        sites = {"fedavg": LocalSteps(fedavg, "fit")}
        for part, step in (("acquisition", "acquire"), ("calibration", "calibrate")):
            sites[part] = LocalSteps(Work(method, data, model, training, device), step)
        sites["calibration"].run("acquire")  # leaves the frozen local model
        for site in sites.values():
            site()  # warms up; also computes the frozen features where they are kept
            site.seconds.clear()
        heavy = model["name"] == "resnet18"
        repeats: list[dict[str, Seconds]] = []
        for _ in range((2 if heavy else 8) if quick else (6 if heavy else 24)):
            for site in sites.values():
                site.seconds.clear()
                site()
            # Within a stretch the median passes over what else the machine did.
            repeats.append({part: (median(site.seconds), median(site.seconds, 1)) for part, site in sites.items()})

        def columns(part: str, rows: Sequence[Mapping[str, Seconds]] = repeats) -> list[Seconds]:
            return [row[part] for row in rows]

        per_batch = {part: median(columns(part)) for part in sites}
        ratios = {part: paired(columns(part), columns("fedavg")) for part in sites}
        epochs = sum(number for _, number in SETTINGS)
        found.append(
            {
                "case": name,
                "frozen_features": "kept" if training.get("augmentation") is None else "computed for every batch",
                "milliseconds_per_mini_batch": {part: 1000 * value for part, value in per_batch.items()},
                "calibration_ratio": ratios["calibration"],
                "calibration_ratio_of_processor_seconds": paired(columns("calibration"), columns("fedavg"), clock=1),
                "calibration_ratio_of_multiply_accumulates": arithmetic(fedavg, training.get("augmentation") is None),
                "whole_run_ratio": sum(number * ratios[part] for part, number in SETTINGS) / epochs,
                "device": device,
            }
        )
    return found


# ELCFS ----------------------------------------------------------------------------------------------------

_UNET: dict[str, Any] = {"name": "unet"}
ELCFS_CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], int, int, int]] = {
    # name: shape of a sample, model, training, samples of the site, passes per image, mini-batches
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 2, 15),
    "resnet18, 64 px": ((3, 64, 64), _RESNET, {"batch_size": 32}, 96, 2, 3),
    "unet, 64 px, with the boundary term": ((3, 64, 64), _UNET, {"batch_size": 5}, 20, 3, 4),
}


def elcfs(quick: bool, device: str) -> list[Row]:
    """Seconds of a local mini-batch of FedAvg and of ELCFS at first order, per image that goes forward and backward.

    ELCFS goes through each mini-batch itself and its copy; with the boundary term through the mini-batch once more.
    """
    torch.set_num_threads(1)
    found = []
    for name, (shape, model, training, samples, passes, steps) in ELCFS_CASES.items():
        masked = model["name"] == "unet"
        data = Synthetic(shape=shape, samples=samples, sites=2, classes=2 if masked else 10, masks=masked)
        sites = {
            "fedavg": LocalSteps(Work({"name": "fedavg"}, data, model, training, device), "fit"),
            "elcfs": LocalSteps(
                Work({"name": "elcfs", "setting": "light", "window": 0.05}, data, model, training, device), "fit"
            ),
        }
        own = sites["elcfs"].run("share_spectra")
        assert isinstance(own, SharedSpectra)
        sites["elcfs"].run("receive", {"bank": {"site1": own.spectra}})
        for site in sites.values():
            site()
        repeats: list[dict[str, Seconds]] = []
        for _ in range((3 if quick else 9) * (2 if model["name"] == "mnist_cnn" else 1)):
            for site in sites.values():
                site.seconds.clear()
                site()
            assert all(len(site.seconds) >= steps for site in sites.values())
            repeats.append({part: (median(site.seconds), median(site.seconds, 1)) for part, site in sites.items()})
        columns = {part: [row[part] for row in repeats] for part in sites}
        found.append(
            {
                "case": name,
                "passes_per_image": passes,
                "milliseconds_per_mini_batch": {part: 1000 * median(values) for part, values in columns.items()},
                "ratio_per_image_gone_through": paired(columns["elcfs"], columns["fedavg"]) / passes,
                "ratio_of_processor_seconds": paired(columns["elcfs"], columns["fedavg"], clock=1) / passes,
                "device": device,
            }
        )
    return found


def arithmetic(work: Work, kept: bool) -> float:
    """Multiply-accumulates of CSAC's calibration over those of FedAvg: convolutions and linear layers, MMD left out.

    A trained module costs three forward passes (forward, gradients by input and by weights). A projection of frozen
    features needs no gradient by its input: two. Frozen features that are not kept cost one more pass of the network.
    """
    network = work.setting.build_network().eval()
    with torch.no_grad():
        _, features = network.with_stages(torch.zeros(2, *work.data.input_shape), network.alignment_stages)
    shapes = [tuple(feature.shape[1:]) for feature in features.values()]
    size = shapes[-1][1:] if len(shapes[-1]) == 3 else (1, 1)
    projections = sum(forward_cost(_alone(projection_layer(shape, 32, (size[0], size[1]))), shape) for shape in shapes)
    plain = forward_cost(network, work.data.input_shape)
    ratio = (3 * plain + (3 + 2) * projections + (0 if kept else plain)) / (3 * plain)
    assert math.isfinite(ratio)
    return ratio


def _alone(module: nn.Module) -> nn.Module:
    return nn.Sequential(module)
