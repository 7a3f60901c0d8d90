"""Samples of no data, with which networks are tried: numbers, or tokens for a network that reads these."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_TOKENS = "reads_tokens"
"""The attribute of a module that cannot read numbers. It stays with copies, and with networks made of the module."""
_FIRST = 2
"""Made-up tokens are 0 and 1: which others a network knows is not known."""


def mark_tokens(module: nn.Module) -> None:
    """Say of a module that it reads tokens, int64 (n, length)."""
    setattr(module, _TOKENS, True)


def reads_tokens(network: nn.Module) -> bool:
    """Whether `mark_tokens` said it of the network or of a part of it."""
    return any(getattr(module, _TOKENS, False) for module in network.modules())


def made_up(network: nn.Module, number: int, shape: tuple[int, ...], draws: torch.Generator | None = None) -> Tensor:
    """Samples (number, \\*shape) on the CPU that the network can read.

    Args:
        network: whose samples.
        number: how many.
        shape: of one.
        draws: numbers in [0, 1] and tokens are drawn from it; None: all are 0.
    """
    if reads_tokens(network):
        return tokens(number, shape, draws)
    return torch.zeros(number, *shape) if draws is None else torch.rand(number, *shape, generator=draws)


def tokens(number: int, shape: tuple[int, ...], draws: torch.Generator | None = None) -> Tensor:
    """Made-up tokens (number, \\*shape), int64."""
    if draws is None:
        return torch.zeros(number, *shape, dtype=torch.int64)
    return torch.randint(0, _FIRST, (number, *shape), generator=draws)
