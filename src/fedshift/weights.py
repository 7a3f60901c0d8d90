"""Arithmetic on named tensors (state dicts): selection, checks, weighted means, merging of BatchNorm statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedshift.errors import TrainingDiverged, UserError

KeyFilter = Callable[[str], bool] | str | Iterable[str]
"""Which keys: a predicate, or dotted prefixes (``"classifier"`` means ``classifier`` itself and ``classifier.*``)."""

_RUNNING_MEAN = "running_mean"
_RUNNING_VAR = "running_var"

# Numbers per piece in reductions: a float64 piece (512 KiB) stays in the cache, a whole tensor would not.
_CHUNK = 65_536


class NamedTensors(Mapping[str, Tensor]):
    """Immutable tensors by name, shared with the mapping they came from (not copied) and without a graph.

    Shared means: made from ``module.state_dict()``, they change when the module trains on; `clone` where that matters.
    """

    kind: ClassVar[str]
    """What the ledger counts such content as."""

    __slots__ = ("_tensors",)
    _tensors: dict[str, Tensor]

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
        """Bytes of all tensors; for float32 weights and int64 counters ``S(θ) = 4·(|θ| + |b|) + 8·n_i``."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def select(self, keys: KeyFilter) -> Self:
        """The tensors whose names ``keys`` accepts, in the same order."""
        accepts = _predicate(keys)
        return type(self)({name: tensor for name, tensor in self._tensors.items() if accepts(name)})

    def without(self, keys: KeyFilter) -> Self:
        """All tensors but those whose names ``keys`` accepts."""
        rejects = _predicate(keys)
        return type(self)({name: tensor for name, tensor in self._tensors.items() if not rejects(name)})

    def merge(self, other: Mapping[str, Tensor]) -> Self:
        """These tensors, with those of ``other`` put over them or added."""
        return type(self)({**self._tensors, **other})

    def check_like(self, reference: Mapping[str, Tensor], who: str) -> None:
        """Raise UserError unless names, shapes and types are those of ``reference``; ``who`` says whose these are."""
        for name, expected in reference.items():
            found = self._tensors.get(name)
            if found is None:
                raise UserError(f"{who}: tensor '{name}' is missing; do all sites use the same model?")
            if found.shape != expected.shape:
                raise UserError(
                    f"{who}: tensor '{name}' has shape {tuple(found.shape)}, expected {tuple(expected.shape)}; "
                    "do all sites use the same model and classes?"
                )
            if found.dtype != expected.dtype:
                raise UserError(f"{who}: tensor '{name}' is {found.dtype}, expected {expected.dtype}")
        if len(self) > len(reference):
            extra = next(name for name in self._tensors if name not in reference)
            raise UserError(f"{who}: tensor '{extra}' is not expected; do all sites use the same model?")

    def check_finite(self, who: str) -> None:
        """Raise TrainingDiverged, naming the tensor, when one holds NaN or infinity; ``who`` says whose these are."""
        for name, tensor in self._tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                # The extremes are NaN where any number is: one pass without a mask of the tensor's size.
                low, high = torch.aminmax(tensor)
                if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                    raise TrainingDiverged(
                        f"{who}: tensor '{name}' holds NaN or infinite numbers; lower the learning rate"
                    )

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return type(self)({name: tensor.clone() for name, tensor in self._tensors.items()})

    def to(self, device: torch.device | str) -> Self:
        """The tensors on ``device``; those already there are shared."""
        return type(self)({name: tensor.to(device) for name, tensor in self._tensors.items()})

    def equal(self, other: Mapping[str, Tensor]) -> bool:
        """Whether names, types, shapes and every bit agree (so NaN equals itself and −0 differs from 0)."""
        if self._tensors.keys() != other.keys():
            return False
        return all(_same_bits(tensor, other[name]) for name, tensor in self._tensors.items())


class Weights(NamedTensors):
    """A model's state: parameters and buffers by name."""

    kind: ClassVar[str] = "weights"
    __slots__ = ()


class MeanAccumulator:
    """Weighted mean of models that arrive one after another; its memory does not grow with their number.

    Float tensors become ``Σ_k w_k t_k / Σ_k w_k``, accumulated in float64 and cast back; integer tensors (BatchNorm's
    counters) become their maximum (section 0, aggregation primitive). Inputs are never written into. The mean of equal
    models has their very bits.

    bn_merge: ``"mean"`` averages BatchNorm's running variances like weights. ``"moments"`` gives the variance of the
        mixture, ``v* = Σ α_k v_k + Σ α_k (m_k − m*)²`` with ``m* = Σ α_k m_k``, which equals ``Σ α_k (v_k + m_k²) −
        m*²`` (KD3A, Feng et al., ICML 2021, appendix; section 7.3) without its cancellation.
    """

    def __init__(self, bn_merge: Literal["mean", "moments"] = "mean") -> None:
        self._moments = bn_merge == "moments"
        self._like: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, float] = {}
        # Origins: numbers of the first model that sums are taken relative to, so that equal models sum to exactly zero.
        self._origins: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def add(self, weights: Mapping[str, Tensor], weight: float | Mapping[str, float], who: str = "a model") -> None:
        """Take one more model with its weight, or one weight per float tensor. Only the ratios of weights matter.

        Raises UserError when keys, shapes or types differ from the first model's (``who`` names the model), and for a
        weight that is negative or not finite.
        """
        model = weights if isinstance(weights, NamedTensors) else Weights(weights)
        if self._moments and isinstance(weight, Mapping):
            raise UserError("bn_merge 'moments' needs one weight per model, not one per tensor; use bn_merge 'mean'")
        if self._like:
            model.check_like(self._like, who)
        else:
            # Only shapes and types are wanted: tensors on "meta" have no memory.
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.items()}
        for name, tensor in model.items():
            if not tensor.is_floating_point():
                known = self._sums.get(name)
                self._sums[name] = tensor.clone() if known is None else torch.maximum(known, tensor)
                continue
            share = weight[name] if isinstance(weight, Mapping) else weight
            if not (math.isfinite(share) and share >= 0):
                raise UserError(f"{who}: weight {share} of tensor '{name}' must be a finite number of at least 0")
            self._add(name, tensor, share)

    def _add(self, name: str, tensor: Tensor, share: float) -> None:
        relative = tensor
        # float64 has no wider type to round back from; running means also need the second moment about a point nearby.
        if tensor.dtype == torch.float64 or self._spreads(name):
            origin = self._origins.get(name)
            if origin is None:
                origin = self._origins[name] = tensor.to(torch.float64, copy=True)
            relative = tensor - origin
        if name in self._sums:
            self._sums[name].add_(relative, alpha=share)
            self._totals[name] += share
        else:
            # Not zeros plus the first: 0 + (−0) would lose the sign of a zero.
            self._sums[name] = relative.to(torch.float64, copy=True).mul_(share)
            self._totals[name] = share
        if self._spreads(name):
            squares = relative.square().mul_(share)
            self._squares[name] = self._squares[name].add_(squares) if name in self._squares else squares

    def _spreads(self, name: str) -> bool:
        return self._moments and _is_last_part(name, _RUNNING_MEAN)

    def result(self, dtype: torch.dtype | None = None) -> Weights:
        """The mean so far, in the models' types or with float tensors in ``dtype`` (float64: not rounded).

        Raises UserError when no model was added or the weights of a tensor sum to zero.
        """
        if not self._like:
            raise UserError("there is no model to average: not one site replied")
        mean: dict[str, Tensor] = {}
        for name, like in self._like.items():
            total = self._sums[name]
            if not like.is_floating_point():
                mean[name] = total.clone()
                continue
            weight = self._totals[name]
            if weight == 0:
                raise UserError(f"the weights of tensor '{name}' sum to zero: at least one must be positive")
            value = total / weight
            if name in self._origins:
                # −0 + 0 is 0, so a zero deviation must leave the origin as it is.
                value = torch.where(value == 0, self._origins[name], self._origins[name] + value)
            between = self._between(name)
            if between is not None:
                value += between
            mean[name] = value.to(dtype or like.dtype)
        return Weights(mean)

    def _between(self, name: str) -> Tensor | None:
        """The weighted variance of the means that belong to running variance ``name``; none where it is not wanted."""
        if not (self._moments and _is_last_part(name, _RUNNING_VAR)):
            return None
        partner = name.removesuffix(_RUNNING_VAR) + _RUNNING_MEAN
        if partner not in self._squares:
            return None
        weight = self._totals[partner]
        shift = self._sums[partner] / weight
        return (self._squares[partner] / weight - shift.square()).clamp_(min=0)


def weighted_average(
    models: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | Mapping[str, Sequence[float]],
    bn_merge: Literal["mean", "moments"] = "mean",
) -> Weights:
    """`MeanAccumulator` over models in memory.

    weights: one number per model, or for each float tensor's key one number per model.
    Raises UserError as `MeanAccumulator` does, and when there are not as many weights as models.
    """
    rows = weights.values() if isinstance(weights, Mapping) else [weights]
    for row in rows:
        if len(row) != len(models):
            raise UserError(f"{len(models)} models but {len(row)} weights: give one weight per model")
    mean = MeanAccumulator(bn_merge)
    for index, model in enumerate(models):
        share = {key: row[index] for key, row in weights.items()} if isinstance(weights, Mapping) else weights[index]
        mean.add(model, share, f"model {index}")
    return mean.result()


def merge_moments(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Weights:
    """Mean of models in which BatchNorm's running mean and variance become those of the mixture of sites.

    The minimiser of KD3A's BatchNorm-MMD (appendix; section 7.3): ``m* = Σ α_k m_k``, ``v* = Σ α_k (v_k + m_k²) −
    m*²``, known by keys that end in ``running_mean`` and ``running_var``. All other tensors are averaged. Raises as
    `weighted_average`.
    """
    return weighted_average(models, weights, bn_merge="moments")


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Weights:
    """``first − second`` for the float tensors; integer tensors are left out. Raises UserError unless they match."""
    Weights(first).check_like(second, "difference")
    return Weights({name: tensor - second[name] for name, tensor in first.items() if tensor.is_floating_point()})


def squared_distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """``‖first − second‖²`` over all float tensors, in float64. Raises UserError when they do not match."""
    Weights(first).check_like(second, "squared distance")
    total = 0.0
    for name, tensor in first.items():
        if tensor.is_floating_point():
            for left, right in float64_chunks(tensor, second[name]):
                gap = left - right
                total += torch.dot(gap, gap).item()
    return total


def float64_chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Flat pieces of two tensors of one shape, side by side, in float64: reductions need no large temporaries."""
    for left, right in zip(
        torch.split(first.reshape(-1), _CHUNK), torch.split(second.reshape(-1), _CHUNK), strict=True
    ):
        yield left.double(), right.double()


def is_buffer(name: str) -> bool:
    """Whether a key names a BatchNorm buffer: a state dict does not tell parameters from buffers otherwise."""
    return any(_is_last_part(name, part) for part in (_RUNNING_MEAN, _RUNNING_VAR, "num_batches_tracked"))


def _is_last_part(name: str, part: str) -> bool:
    return name.rpartition(".")[2] == part


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
