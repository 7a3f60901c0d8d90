"""The part ``pooled`` of `bench.py`: a mini-batch of each pooled method beside DeepAll's and its own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench_common import ENDLESS, Row, Seconds, Synthetic, Work, median, median_ratio, time_block
from fedshift.federation.site import Envelope
from fedshift.federation.site_runner import SiteRunner

DOMAINS = 3
PASSES: Mapping[str, float] = {
    "mixstyle": 1,
    "jigen": 1,
    "dmg": 1,
    "dger": 1,
    "metareg": 1 + 4 / (3 * DOMAINS),  # an episode's four mini-batches pass forward
    "eisnet": 4 / 3,  # the key encoder's forward pass
    "fact": 8 / 3,  # two views, and the teacher's forward passes over both
    "crossgrad": 4,  # two networks: two views each
    "epi_fcr": (6 * DOMAINS + 1) / (3 * DOMAINS),  # a network for each domain; one frozen forward pass
    "masf": (2 * DOMAINS - 1) / DOMAINS,  # the held-back domain passes after the inner step alone
    # For all but one: a step, and the critic's gradient with its derivative; for the other: twice forward, once back.
    "feature_critic": ((3 + 2 + 4) * (DOMAINS - 1) + 4) / (3 * DOMAINS),
}
"""What the equations of a method need for a mini-batch, in those of DeepAll: a forward pass is a third, a pass back to
inputs or to weights another. Heads are left out."""

CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], int]] = {
    # name: shape of a sample, model, training, mini-batches at a stretch
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 12),
    "resnet18, 32 px": ((3, 32, 32), {"name": "resnet18", "bottleneck": 256}, {"batch_size": 16}, 6),
}


class Pool:
    """The pool of a method; every call trains on so many mini-batches, in the middle of a run."""

    def __init__(self, name: str, case: str, device: str) -> None:
        shape, model, training, self.steps = CASES[case]
        work = Work({"name": name}, Synthetic(shape=shape, samples=192, sites=DOMAINS), model, training, device)
        self.runner, self.weights, self.exchange = SiteRunner(work.plans[0], work.setting), work.start(), 0

    def __call__(self, steps: int) -> None:
        self.exchange += 1
        content = {"weights": self.weights, "steps": steps}
        _, trained = self.runner.run("fit", Envelope(self.exchange, self.exchange, 0.3, ENDLESS), content)
        assert trained == content["steps"]

    def arithmetic(self) -> float:
        """Floating-point operations of a mini-batch: matrix products and convolutions, forward and back."""
        with _Operations() as counter:
            self(DOMAINS)
        return float(counter.total) / DOMAINS


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations, wherever they come from; `FlopCounterMode` fails in `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        output = function(*arguments, **(options or {}))
        count = flop_registry.get(function._overloadpacket)
        self.total += count(*arguments, **(options or {}), out_val=output) if count else 0
        return output


def measure_pooled(quick: bool, device: str) -> list[Row]:
    """Seconds of a mini-batch of every pooled method of domain generalization and of DeepAll, in turn, one thread."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in list(CASES)[: 1 if quick else None]:
        pools = {name: Pool(name, case, device) for name in ("deepall", *PASSES)}
        done = {name: pool.arithmetic() for name, pool in pools.items()}
        seconds: dict[str, list[Seconds]] = {name: [] for name in pools}
        for _ in range(5 if quick else 9):
            for name, pool in pools.items():
                seconds[name].append(time_block(pool, pool.steps))
        for name, passes in PASSES.items():
            ratio = median_ratio(seconds[name], seconds["deepall"])
            processor = median_ratio(seconds[name], seconds["deepall"], clock=1)
            rows.append(
                {
                    "case": case,
                    "method": name,
                    "milliseconds_per_mini_batch": 1000 * median(seconds[name], 1) / pools[name].steps,
                    "passes": passes,
                    "operations": done[name] / done["deepall"],
                    "ratio": ratio,
                    "ratio_of_processor_seconds": processor,
                    "beside_its_arithmetic": processor * done["deepall"] / done[name],
                    "device": device,
                }
            )
    return rows
