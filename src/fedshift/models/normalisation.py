"""Normalisation layers that replace BatchNorm."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedshift.models.network import Network


class BatchInstanceNorm2d(nn.BatchNorm2d):
    """ρ·BatchNorm + (1 − ρ)·InstanceNorm, with one scale and shift for both.

    ρ (``gate``) is learned per channel within [0, 1]. It starts at 1, which is plain BatchNorm. Source: Nam and Kim,
    NeurIPS 2018.

    Args:
        like: the layer whose settings, weights and statistics are copied.
    """

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.load_state_dict(like.state_dict())
        self.gate = nn.Parameter(torch.ones(like.num_features))

    def forward(self, inputs: Tensor) -> Tensor:
        whole = super().forward(inputs)
        if inputs.shape[2:].numel() == 1:  # InstanceNorm needs more than one position
            return whole
        own = functional.instance_norm(inputs, weight=self.weight, bias=self.bias, eps=self.eps)
        share = self.gate.clamp(0, 1).view(1, -1, 1, 1)
        return share * whole + (1 - share) * own


def hybrid_normalised(network: Network) -> Network:
    """A copy of ``network`` with a `BatchInstanceNorm2d` in place of every BatchNorm2d."""
    made = copy.deepcopy(network)
    for path, module in list(made.named_modules()):
        if type(module) is nn.BatchNorm2d:
            parent, _, child = path.rpartition(".")
            setattr(made.get_submodule(parent), child, BatchInstanceNorm2d(module))
    return made
