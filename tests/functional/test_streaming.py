"""Aggregation holds one model at a time, however many sites there are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedshift.functional.averaging import MeanAccumulator
from fedshift.methods.federated.csac import divergence_aggregate
from fedshift.weights import Weights

NUMBERS = 250_000  # a model of 1 MB


class Counted:
    """Models made anew in every pass. Counts those whose memory is still held, by whatever view or detached copy."""

    def __init__(self, count: int) -> None:
        self.count, self.live, self.most = count, 0, 0

    def __iter__(self) -> Iterator[Weights]:
        for index in range(self.count):
            yield self._model(index)

    def _model(self, index: int) -> Weights:
        values = np.random.default_rng(index).standard_normal(NUMBERS, dtype=np.float32)
        # A tensor made from an array keeps it alive for as long as anything shares the tensor's memory.
        weakref.finalize(values, self._freed)
        self.live += 1
        self.most = max(self.most, self.live)
        return Weights({"w": torch.from_numpy(values), "n": torch.tensor(index)})

    def _freed(self) -> None:
        self.live -= 1


@pytest.mark.parametrize("rule", ["divergence", "similarity", "average"])
@pytest.mark.parametrize("granularity", ["tensor", "module"])
def test_divergence_aggregate_lets_go_of_every_model(rule: str, granularity: str) -> None:
    models = Counted(12)
    fused, _ = divergence_aggregate(models, granularity=granularity, rule=rule)  # type: ignore[arg-type]
    # The second is the next one, made while the loop variable still names the last.
    assert models.most == 2
    assert models.live == 0
    assert fused["n"].item() == 11


@pytest.mark.parametrize("bn_merge", ["mean", "moments"])
def test_memory_of_the_mean_is_the_same_for_2_and_50_models(bn_merge: str) -> None:
    def held_after(count: int) -> int:
        models, mean = Counted(count), MeanAccumulator(bn_merge)  # type: ignore[arg-type]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            for model in models:
                mean.add(model, 1.0)
        assert models.most == 2
        del model
        assert models.live == 0
        # Allocations less releases of all of PyTorch.
        return sum(event.self_cpu_memory_usage for event in profile.key_averages())

    few, many = held_after(2), held_after(50)
    assert few >= 8 * NUMBERS  # the float64 sum is seen
    assert abs(many - few) < 4096
