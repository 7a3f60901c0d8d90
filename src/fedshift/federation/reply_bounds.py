"""What a reply may hold beyond the types of its fields: shapes of tensors, ranges of numbers and of values.

The reply's class declares a range that never changes: ``Annotated[float, Between(0, 1)]``. The method's `bounds` gives
what depends on the run. The rest follows from the request and the network, see `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from fedshift.federation.training import Training
from fedshift.models.network import Network

LARGEST_INTEGER = 2**53
"""Larger integers from a site are refused, since they would overflow where they become floats."""
LARGEST_NUMBER = 3.4028235e38
"""The largest float32. A loss beyond it is no loss, and a sum of such numbers would overflow."""
LARGEST_VALUE = 1e6
"""Largest value in tensors other than models, unless a method sets another. No network trains on larger values."""


@dataclass(frozen=True)
class Between:
    """The range of a number, ends included."""

    low: float
    high: float


Share = Annotated[float, Between(0, 1)]
"""A part of a whole."""
NotNegative = Annotated[float, Between(0, LARGEST_NUMBER)]
Count = Annotated[int, Between(0, LARGEST_INTEGER)]


@dataclass(frozen=True)
class Tensors:
    """How the tensors of a field must look.

    Attributes:
        shapes: the shape of each tensor, by name. None in place of the first size stands for 1 to ``rows`` rows.
        rows: most rows where the first size is None.
        low: the smallest value.
        high: the largest value.
        dtype: the type of all of them.
        may_be_empty: whether the field may hold no tensor at all.
    """

    shapes: Mapping[str, tuple[int | None, ...]]
    rows: int = 0
    low: float = -LARGEST_VALUE
    high: float = LARGEST_VALUE
    dtype: torch.dtype = torch.float32
    may_be_empty: bool = False


Bounds = Mapping[str, Tensors | Between]
"""What fields of a reply may hold, by field."""


@dataclass(frozen=True)
class About:
    """What the server knows of one site before it asks: what replies are checked against.

    Attributes:
        network: what sites train, with the weights that the run starts from.
        samples: training samples of the site, as it said when it joined.
        input_shape: of one sample.
        classes: how many classes there are.
        training: how sites train.
    """

    network: Network
    samples: int
    input_shape: tuple[int, ...]
    classes: int
    training: Training
