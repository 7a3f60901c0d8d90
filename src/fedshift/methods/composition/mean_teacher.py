"""A copy of a network that follows it slowly: FACT's teacher, EISNet's key encoder."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedshift.functional.distillation import move_towards


class MeanTeacher(nn.Module):
    """θ̄, the exponential average of a network's weights. It counts its steps, so it can be kept between rounds.

    ``network``: what it follows; its weights are the start. ``momentum``: m of θ̄ ← m θ̄ + (1 − m) θ. ``warm_up``:
    whether m is at most 1 − 1/(t + 1) in step t, so that the start is forgotten.
    """

    steps: Tensor

    def __init__(self, network: nn.Module, momentum: float, *, warm_up: bool) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.momentum, self.warm_up = momentum, warm_up
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def follow(self, network: nn.Module) -> None:
        """One step of its parameters towards ``network``. Its buffers are its own."""
        self.steps += 1
        number = int(self.steps)
        momentum = min(1 - 1 / (number + 1), self.momentum) if self.warm_up else self.momentum
        move_towards(self.network.parameters(), network.parameters(), momentum)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Its outputs for ``inputs``, without a gradient."""
        network: Tensor = self.network(inputs)
        return network
