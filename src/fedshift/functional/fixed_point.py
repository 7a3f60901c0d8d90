"""Fixed point: numbers as integers modulo 2^64, so that sums are exact and do not depend on the order of the terms.

torch's int64 wraps around, so its addition is addition modulo 2^64. A sum is right as long as the true sum lies between
−2^63 and 2^63, which `to_fixed` ensures for a stated number of terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import FedshiftError

FRACTION_BITS = 32
"""Bits after the point. A number is rounded by at most 2^-33."""


def to_fixed(numbers: Tensor, terms: int, weight: float = 1.0) -> Tensor:
    """``round(weight · x · 2^32)`` as int64.

    ``numbers``: x, floating point or integers. ``terms``: how many such tensors are added at most; their sum has to
    fit, too. ``weight``: a factor. Raises FedshiftError: a number is NaN or infinite, or too large for a sum of so many
    terms.

    Example:
        >>> to_fixed(torch.tensor([0.5, -1.0]), terms=2) * 2**-32
        tensor([ 0.5000, -1.0000])
    """
    # A power of two is multiplied exactly, so only the weight and the rounding below change digits.
    scaled = numbers.detach().to("cpu", torch.float64, copy=True).reshape(-1).mul_(weight).mul_(2.0**FRACTION_BITS)
    scaled.round_()
    if scaled.numel():
        low, high = torch.aminmax(scaled)  # NaN if any number is
        largest = max(-low.item(), high.item())
        if not largest <= _most(terms):
            raise FedshiftError(
                f"a number of {largest * 2.0**-FRACTION_BITS:.3g} is too large for a sum of {terms} terms, in which "
                f"each is at most {_most(terms) * 2.0**-FRACTION_BITS:.3g}; lower the learning rate, or use plain "
                "aggregation"
            )
    return scaled.to(torch.int64)


def from_fixed(total: Tensor) -> Tensor:
    """The float64 numbers of a sum of `to_fixed`.

    Example:
        >>> from_fixed(torch.tensor([2**31, -(2**32)]))
        tensor([ 0.5000, -1.0000], dtype=torch.float64)
    """
    return total.to(torch.float64).mul_(2.0**-FRACTION_BITS)


def _most(terms: int) -> float:
    # float64 has no 2^63 − 1; one bit less leaves room for the rounding of every term.
    return float(2**62 // terms)
