"""The parts of `bench.py` that run whole rounds: the engine against a bare loop, workers against threads, an epoch of
KD3A against a bare loop, rounds of MDFNet.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench_common import Rounds, Row, Synthetic, Work, median, median_ratio, time_block, time_in_turn
from fedshift.data.domain import SparseRows
from fedshift.data.transforms import to_network
from fedshift.federation.local.pool import WorkerPool
from fedshift.federation.randomness import generator
from fedshift.methods.federated.kd3a import FocusTally, distillation_loss, domain_weights, knowledge_vote
from fedshift.weights import Weights

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
    seconds = time_in_turn(blocks, 0.5 if quick else 1.2, 5 if quick else 11, device)
    images = sum(len(rows) for plan in work.plans for _, rows, _ in plan.parts)
    return [
        {
            "data": data["name"],
            "bare_loop": name,
            "fedshift_images_per_second": images / median(seconds["fedshift"]),
            "bare_images_per_second": images / median(seconds[name]),
            "ratio": median_ratio(seconds[name], seconds["fedshift"]),
            "ratio_of_processor_seconds": median_ratio(seconds[name], seconds["fedshift"], clock=1),
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
    rows = []
    pools = WorkerPool(2, 1), WorkerPool(1, 1), WorkerPool(1, 1)
    try:
        for name, (shape, model) in WORKER_MODELS.items():
            data = Synthetic(shape=shape, samples=512 if len(shape) == 3 else 4096)
            work = Work({"name": "fedavg", "local_epochs": 1}, data, model, {"batch_size": 64})
            one_worker, two_workers, two_threads = Rounds(work), Rounds(work, pools[0]), Rounds(work, threads=2)
            both = Both([Rounds(work, pool) for pool in pools[1:]])
            blocks: dict[str, Callable[[int], None]] = {
                "one": one_worker,
                "workers": two_workers,
                "threads": two_threads,
                "runs": both,
            }
            for block in blocks.values():
                block(1)
            mini_batches = one_worker.mini_batches
            seconds = time_in_turn(blocks, 0.4 if quick else 1.2, 3 if quick else 7)
            gains = {
                "two_workers": median_ratio(seconds["one"], seconds["workers"]),
                "two_threads": median_ratio(seconds["one"], seconds["threads"]),
                "two_runs": 2 * median_ratio(seconds["one"], seconds["runs"]),
            }
            rows.append(
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
    return rows


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

    def _train(self, name: str, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
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

                def supervised_loss(
                    model: nn.Module, rows: Tensor, inputs: Tensor = inputs, labels: Tensor = labels
                ) -> Tensor:
                    return F.cross_entropy(model(inputs[rows]), labels[rows])

                models.append(self._train(name, supervised_loss))
            self.exchange += 1
            inputs, _ = self.sites[self.target]
            with torch.no_grad():
                predicted = torch.stack(
                    [torch.cat([model(part).softmax(1) for part in torch.split(inputs, 500)]) for model in models]
                )

            def distilled_loss(
                model: nn.Module, rows: Tensor, inputs: Tensor = inputs, predicted: Tensor = predicted
            ) -> Tensor:
                consensus = knowledge_vote(predicted[:, rows], self.gate)
                return distillation_loss(model(inputs[rows]), consensus.probabilities, consensus.support)

            models.append(self._train(self.target, distilled_loss))
            sizes = [len(self.sites[name][1]) for name in sources]
            tally = FocusTally(len(predicted), self.gate)
            tally.add(predicted)
            shares, own_share = domain_weights(tally.focus(), sizes, len(inputs))
            states = [model.state_dict() for model in models]
            self.network.load_state_dict(
                {
                    key: sum(state[key] * share for state, share in zip(states, [*shares, own_share], strict=True))
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
    seconds = time_in_turn(blocks, 1.0, 3 if quick else 7)
    return [
        {
            "data": "amazon_reviews",
            "mini_batches": sum(-(-len(rows) // 50) for plan in work.plans for _, rows, _ in plan.parts),
            "fedshift_seconds_per_epoch": median(seconds["fedshift"]),
            "bare_seconds_per_epoch": median(seconds["bare"]),
            "ratio": median_ratio(seconds["bare"], seconds["fedshift"]),
            "ratio_of_processor_seconds": median_ratio(seconds["bare"], seconds["fedshift"], clock=1),
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
            seconds = time_block(run, rounds)[0]
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
