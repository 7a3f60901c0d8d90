"""Named tensors (state dicts): selection, merging and checks. Arithmetic on them is in `functional.averaging`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedshift.errors import TrainingDiverged, UserError

KeyFilter = Callable[[str], bool] | str | Iterable[str]
"""A choice of keys: a predicate, or dotted prefixes (``"head"`` means ``head`` itself and ``head.*``)."""


class NamedTensors(Mapping[str, Tensor]):
    """Immutable tensors by name, detached from any graph. They share memory with the mapping they came from.

    So tensors made from ``module.state_dict()`` change when the module trains on; use `clone` where that matters.

    Raises:
        UserError: a value is not a tensor.

    Example:
        >>> weights = Weights({"features.w": torch.zeros(3), "head.w": torch.zeros(2), "head.b": torch.zeros(1)})
        >>> list(weights.select("head")), list(weights.without("head")), weights.nbytes
        (['head.w', 'head.b'], ['features.w'], 24)
    """

    kind: ClassVar[str]
    """The kind of content under which the ledger counts it."""

    __slots__ = ("_nbytes", "_tensors")
    _tensors: dict[str, Tensor]
    _nbytes: int

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise UserError(
                    f"'{name}' is a {type(tensor).__name__}, not a tensor: only tensors can be kept by name"
                )
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors, {self.nbytes:,} bytes)"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.equal(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors. For float32 weights and int64 counters ``S(θ) = 4·(|θ| + |b|) + 8·n_i``."""
        try:
            return self._nbytes  # every site is sent the same model, and the ledger counts it for each
        except AttributeError:
            self._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
            return self._nbytes

    def select(self, keys: KeyFilter) -> Self:
        """The tensors whose names ``keys`` accepts, in the same order."""
        accepts = _predicate(keys)
        return type(self)({name: tensor for name, tensor in self._tensors.items() if accepts(name)})

    def without(self, keys: KeyFilter) -> Self:
        """All tensors except those whose names ``keys`` accepts."""
        rejects = _predicate(keys)
        return type(self)({name: tensor for name, tensor in self._tensors.items() if not rejects(name)})

    def merge(self, other: Mapping[str, Tensor]) -> Self:
        """These tensors and those of ``other``, whose tensors replace equal names. Like ``dict | other``."""
        return type(self)({**self._tensors, **other})

    def check_like(self, reference: Mapping[str, Tensor], who: str) -> None:
        """Check that names, shapes and types are those of ``reference``.

        ``who``: what a message calls the owner of these tensors. UserError if they differ.
        """
        for name, expected in reference.items():
            result = self._tensors.get(name)
            if result is None:
                raise UserError(f"{who}: tensor '{name}' is missing; do all sites use the same model?")
            if result.shape != expected.shape:
                raise UserError(
                    f"{who}: tensor '{name}' has shape {tuple(result.shape)}, expected {tuple(expected.shape)}; "
                    "do all sites use the same model and classes?"
                )
            if result.dtype != expected.dtype:
                raise UserError(f"{who}: tensor '{name}' is {result.dtype}, expected {expected.dtype}")
        if len(self) > len(reference):
            extra = next(name for name in self._tensors if name not in reference)
            raise UserError(f"{who}: tensor '{extra}' is not expected; do all sites use the same model?")

    def check_finite(self, who: str, remedy: str = "lower the learning rate") -> None:
        """Check that no tensor holds NaN or infinity.

        ``who``: what a message calls the owner of these tensors. TrainingDiverged if a tensor does; the message names
        it.
        """
        for name, tensor in self._tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                # The extremes are NaN if any number is. This takes one pass and no mask.
                low, high = torch.aminmax(tensor)
                if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                    raise TrainingDiverged(f"{who}: tensor '{name}' holds NaN or infinite numbers; {remedy}")

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return type(self)({name: tensor.clone() for name, tensor in self._tensors.items()})

    def to(self, device: torch.device | str) -> Self:
        """The tensors on ``device``. Those that are already there are shared."""
        return type(self)({name: tensor.to(device) for name, tensor in self._tensors.items()})

    def equal(self, other: Mapping[str, Tensor]) -> bool:
        """Whether names, types, shapes and every bit agree. So NaN equals itself, and −0 differs from 0."""
        if self._tensors.keys() != other.keys():
            return False
        return all(_same_bits(tensor, other[name]) for name, tensor in self._tensors.items())


class Weights(NamedTensors):
    """A model's state: parameters and buffers by name."""

    kind: ClassVar[str] = "weights"
    __slots__ = ()


def _predicate(keys: KeyFilter) -> Callable[[str], bool]:
    if callable(keys):
        return keys
    prefixes = [prefix.rstrip(".") for prefix in ([keys] if isinstance(keys, str) else keys)]
    return lambda name: any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    left, right = (tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(left, right.to(left.device))
