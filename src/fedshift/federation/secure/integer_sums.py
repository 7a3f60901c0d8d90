"""Replies that the server reads only as their sum, as integers modulo 2^64, in every engine alike.

A contribution is one flat vector: a one, the site's weight w, then w times every number and tensor of the reply. The
sum of the ones must be the number of sites that answered, or masks did not cancel. The sum of the weights divides the
others. So means are weighted by what the sites say, and no weight of a single site is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, RootModel
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Mean, R, Replies
from fedshift.federation.messages import KINDS, Masked, Reply, reply_content
from fedshift.functional.fixed_point import from_fixed, to_fixed
from fedshift.weights import NamedTensors

By = Literal["samples", "uniform"]
SMALLEST_ROSTER = 3
"""The fewest sites of a sum. With two, each learns the other's contribution from the sum."""
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)}
_MOST = 2**40
"""Most numbers of a contribution. A layout with more is a mistake or an attack."""
_SMALLEST_WEIGHT = 2.0**-20
"""The smallest weight of a site. With a smaller one its numbers would be rounded off, and a sum be of the others."""


def threshold(roster: int, colluders: int = 0) -> int:
    """t = ⌈(H + c + 1) / 2⌉: how many of H sites must answer, and tell shares, so that a sum can be unmasked.

    Two sets of t sites share 2t − H ≥ c + 1 of them. So one of these is honest if at most c work with the server.
    """
    return (roster + colluders + 2) // 2


@dataclass(frozen=True)
class Weighing:
    """How contributions are weighted."""

    by: By  # ``samples`` weighs a site by its N_k, ``uniform`` by 1
    # N_k is divided by 2 to this power, so that weights sum to at most 1; a power of two changes no digit
    exponent: int
    terms: int  # how many sites are asked

    @staticmethod
    def of(by: By, samples: Sequence[int]) -> Weighing:
        """For sites with so many ``samples``."""
        return Weighing(by, max(0, math.ceil(math.log2(max(1, sum(samples))))), len(samples))

    def weight(self, reply: Reply) -> float:
        """w of a reply."""
        return 1.0 if self.by == "uniform" else float(reply_content(reply)["samples"]) * 2.0**-self.exponent  # type: ignore[arg-type]


_Tensor = tuple[str, str, str, str, tuple[Annotated[int, Field(ge=0)], ...]]


class LayoutEntry(RootModel[tuple[tuple[str, ...], tuple[_Tensor, ...]]]):
    """A `Layout` as it stands in a message: its two fields."""

    model_config = ConfigDict(frozen=True, strict=True)


@dataclass(frozen=True)
class Layout:
    """What the integers of a contribution stand for after the one and the weight."""

    numbers: tuple[str, ...]  # names of the fields that are numbers
    tensors: tuple[tuple[str, str, str, str, tuple[int, ...]], ...]  # field, kind, name, type and shape of each tensor

    @property
    def entry(self) -> LayoutEntry:
        """The same for a message."""
        return LayoutEntry((self.numbers, self.tensors))

    @property
    def length(self) -> int:
        """Integers of a contribution."""
        return 2 + len(self.numbers) + sum(math.prod(shape) for *_, shape in self.tensors)

    @staticmethod
    def read(entry: LayoutEntry | None) -> Layout:
        """From a message. Raises FedshiftError: there is none, or one of tensors that no sum has."""
        result = None if entry is None else Layout(*entry.root)
        known = result is not None and all(
            kind in KINDS and dtype in _DTYPES for _, kind, _, dtype, _ in result.tensors
        )
        if result is None or not known or result.length > _MOST:
            raise FedshiftError("it does not describe what it contributes to the sum")
        return result


@dataclass(frozen=True)
class Contribution(Reply):
    """What a site adds to a sum: integers, (n,), plain within one machine and masked between machines."""

    numbers: Masked
    layout: Layout


def contribution(reply: Reply, weighing: Weighing) -> Contribution:
    """A reply as integers.

    Raises:
        FedshiftError: a field cannot be added, a number is too large, or the weight is so small that others' are not.
    """
    weight = weighing.weight(reply)
    if weight < _SMALLEST_WEIGHT:
        raise FedshiftError(
            f"its samples are less than one in {1 / _SMALLEST_WEIGHT:.0f} of those of the sum, so its numbers would be "
            "rounded off"
        )
    numbers: list[str] = []
    tensors: list[tuple[str, str, str, str, tuple[int, ...]]] = []
    flat: list[Tensor] = []
    values: list[float] = []
    for field, value in reply_content(reply).items():
        if isinstance(value, NamedTensors):
            for name, tensor in value.items():
                if str(tensor.dtype) not in _DTYPES:
                    raise FedshiftError(f"'{field}/{name}' holds {tensor.dtype}, which cannot be summed")
                tensors.append((field, value.kind, name, str(tensor.dtype), tuple(tensor.shape)))
                flat.append(to_fixed(tensor, weighing.terms, weight))
        elif field == "samples":
            continue  # it is in the weight
        elif isinstance(value, int | float):
            numbers.append(field)
            values.append(float(value))
        else:
            raise FedshiftError(f"field '{field}' is a {type(value).__name__}, which cannot be summed")
    head = torch.tensor([1], dtype=torch.int64)
    fixed_weight = to_fixed(torch.tensor([weight], dtype=torch.float64), weighing.terms)
    text = to_fixed(torch.tensor(values, dtype=torch.float64), weighing.terms, weight)
    return Contribution(
        Masked({"sum": torch.cat([head, fixed_weight, text, *flat])}), Layout(tuple(numbers), tuple(tensors))
    )


class Total:
    """The sum of contributions, one after the other."""

    def __init__(self) -> None:
        self.sites: list[str] = []
        self.numbers: Tensor | None = None
        self.layout: Layout | None = None

    def add(self, site: str, added: Contribution) -> None:
        """Add a site's contribution. Raises FedshiftError: it is laid out otherwise than those before."""
        numbers = added.numbers["sum"]
        if self.numbers is None or self.layout is None:
            self.layout, self.numbers = added.layout, numbers.clone()
        elif added.layout != self.layout:
            raise FedshiftError(f"site '{site}' contributes other tensors than '{self.sites[0]}'; use the same model")
        else:
            self.numbers += numbers
        self.sites.append(site)

    def mean(self) -> Mean:
        """The weighted mean of what was added.

        Raises FedshiftError: nothing was added, or masks are still on the sum.
        """
        if self.numbers is None or self.layout is None:
            raise FedshiftError("no site answered")
        if self.numbers[0].item() != len(self.sites):
            raise FedshiftError("the masks of the sites did not cancel: the sites got different requests, or one lied")
        result = from_fixed(self.numbers[1:])
        weight = result[0].item()
        if not weight > 0:
            raise FedshiftError("the weights of the sites sum to zero")
        result = result.div_(weight)
        first = 1 + len(self.layout.numbers)
        losses = dict(zip(self.layout.numbers, result[1:first].tolist(), strict=True))
        parts: dict[str, dict[str, Tensor]] = {}
        kinds: dict[str, str] = {}
        for field, kind, name, dtype, shape in self.layout.tensors:
            part = result[first : first + math.prod(shape)].reshape(shape)
            first += math.prod(shape)
            kinds[field] = kind
            parts.setdefault(field, {})[name] = _as(part, _DTYPES[dtype])
        tensors = {field: KINDS[kind](parts[field]) for field, kind in kinds.items()}
        return Mean(tensors, {name: {ALL: value} for name, value in losses.items()}, {}, len(self.sites))


ALL = "all sites"
"""The key of a mean over all sites in a record, where no single site's number is known."""


def _as(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """A mean in the type of what was averaged. Integers, BatchNorm's counters, are rounded."""
    return (mean.round() if not dtype.is_floating_point else mean).to(dtype, copy=True)


class SumOnly(Replies[R]):
    """Replies under secure aggregation. Only `mean` reads them, and the exchange begins when it is called."""

    def __init__(self, sites: Sequence[str], take: Callable[[By], Mean]) -> None:
        super().__init__(sites, _nothing())
        self._take, self._taken = take, False

    def mean(self, by: str | Mapping[str, float] = "samples") -> Mean:
        if by != "samples" and by != "uniform":
            raise FedshiftError("under secure aggregation replies are weighted by samples or alike, not one by one")
        if self._taken:
            raise FedshiftError("replies under secure aggregation can be summed only once")
        self._taken = True
        return self._take("samples" if by == "samples" else "uniform")

    def items(self) -> Iterator[tuple[str, R]]:
        raise self._refusal()

    def keep(self) -> Replies[R]:
        raise self._refusal()

    def numbers(self, name: str) -> dict[str, float]:
        raise self._refusal()

    def drain(self) -> None:
        if not self._taken:
            raise self._refusal()

    def _refusal(self) -> FedshiftError:
        return FedshiftError(
            "under secure aggregation the reply of a single site cannot be read: the method may only use replies.mean()"
        )


def _nothing() -> Any:
    yield from ()
