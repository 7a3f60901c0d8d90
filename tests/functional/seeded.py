"""Numbers that are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal ones, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
