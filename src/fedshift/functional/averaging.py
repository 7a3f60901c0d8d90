"""Weighted means of models, and merged BatchNorm statistics."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.weights import NamedTensors, Weights

_RUNNING_MEAN = "running_mean"
_RUNNING_VAR = "running_var"

# Numbers per piece in reductions. A float64 piece of 512 KiB stays in the cache; a whole tensor does not.
_CHUNK = 65_536


class MeanAccumulator:
    """Weighted mean of models that arrive one after another. Memory does not grow with their number.

    Float tensors become ``Σ_k w_k t_k / Σ_k w_k``, summed in float64 and cast back. Integer tensors (BatchNorm's
    counters) become their maximum. Inputs are never written into. The mean of equal models is bitwise equal to them.

    ``bn_merge``: ``"mean"`` averages BatchNorm's running variances like weights. ``"moments"`` takes the variance of
    the mixture (KD3A, Feng et al., ICML 2021, appendix E), ``v* = Σ α_k v_k + Σ α_k (m_k − m*)²`` with ``m* = Σ α_k
    m_k``. This equals ``Σ α_k (v_k + m_k²) − m*²`` but does not cancel digits.

    Example:
        >>> mean = MeanAccumulator()
        >>> mean.add({"w": torch.tensor([0.0])}, 1)
        >>> mean.add({"w": torch.tensor([4.0])}, 3)
        >>> mean.result()["w"]
        tensor([3.])
    """

    def __init__(self, bn_merge: Literal["mean", "moments"] = "mean") -> None:
        self._moments = bn_merge == "moments"
        self._like: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, float] = {}
        # The first model's numbers. Sums are relative to them, so that equal models sum to exactly zero.
        self._origins: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def add(self, weights: Mapping[str, Tensor], weight: float | Mapping[str, float], who: str = "a model") -> None:
        """Add a model.

        ``weights``: its tensors by name. ``weight``: the model's weight, or one for each float tensor. Only ratios
        matter. ``who``: what a message calls the model. Raises UserError: keys, shapes or types differ from the first
        model's, or a weight is negative or not finite.
        """
        model = weights if isinstance(weights, NamedTensors) else Weights(weights)
        if self._moments and isinstance(weight, Mapping):
            raise UserError("bn_merge 'moments' needs one weight per model, not one per tensor; use bn_merge 'mean'")
        if self._like:
            model.check_like(self._like, who)
        else:
            # Tensors on "meta" have shapes and types but no memory.
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
        """Add one float tensor to its sum."""
        relative = tensor
        # Relative sums where float64 is the type itself, and where a second moment about a near point is needed.
        if tensor.dtype == torch.float64 or self._spreads(name):
            origin = self._origins.get(name)
            if origin is None:
                origin = self._origins[name] = tensor.to(torch.float64, copy=True)
            relative = tensor - origin
        if name in self._sums:
            self._sums[name].add_(relative, alpha=share)
            self._totals[name] += share
        else:
            # A copy, because zeros plus the first would turn −0 into 0.
            self._sums[name] = relative.to(torch.float64, copy=True).mul_(share)
            self._totals[name] = share
        if self._spreads(name):
            squares = relative.square().mul_(share)
            self._squares[name] = self._squares[name].add_(squares) if name in self._squares else squares

    def _spreads(self, name: str) -> bool:
        """Whether the tensor's spread over models is needed too: running means under ``"moments"``."""
        return self._moments and _is_last_part(name, _RUNNING_MEAN)

    def result(self, dtype: torch.dtype | None = None) -> Weights:
        """The mean of the models added so far.

        ``dtype``: type of the float tensors; the models' own by default. Pass float64 for a mean that is not rounded.
        Raises UserError: no model was added, or the weights of a tensor sum to zero.
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
            between = self._between(name)
            if name not in self._origins and between is None:
                mean[name] = _divide(total, weight, dtype or like.dtype)
                continue
            value = total / weight
            if name in self._origins:
                # Where the deviation is zero the origin is taken as it is, because −0 + 0 is 0.
                value = torch.where(value == 0, self._origins[name], self._origins[name] + value)
            if between is not None:
                value += between
            mean[name] = value.to(dtype or like.dtype)
        return Weights(mean)

    def _between(self, name: str) -> Tensor | None:
        """The weighted variance of the running means that belong to running variance ``name``; None if not wanted."""
        if not (self._moments and _is_last_part(name, _RUNNING_VAR)):
            return None
        partner = name.removesuffix(_RUNNING_VAR) + _RUNNING_MEAN
        if partner not in self._squares:
            return None
        weight = self._totals[partner]
        shift = self._sums[partner] / weight
        return (self._squares[partner] / weight - shift.square()).clamp_(min=0)


def _divide(total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """``total / weight`` as ``dtype``, piece by piece: a large tensor needs no quotient of its size in float64."""
    if total.numel() <= _CHUNK or not total.is_contiguous():
        return (total / weight).to(dtype)
    out = torch.empty_like(total, dtype=dtype)
    for part, sums in zip(torch.split(out.view(-1), _CHUNK), torch.split(total.view(-1), _CHUNK), strict=True):
        part.copy_(sums / weight)
    return out


def weighted_average(
    models: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | Mapping[str, Sequence[float]],
    bn_merge: Literal["mean", "moments"] = "mean",
) -> Weights:
    """Weighted mean of models in memory: `MeanAccumulator` in one call.

    ``models``: state dicts with the same keys. ``weights``: one number per model, or for each float tensor's key one
    number per model. ``bn_merge``: as in `MeanAccumulator`. Raises UserError: there are not as many weights as models,
    or as in `MeanAccumulator`.

    Example:
        >>> models = [{"bn.running_mean": torch.tensor([m]), "bn.running_var": torch.tensor([1.0])} for m in (0.0, 2.0)]
        >>> weighted_average(models, [1, 1])["bn.running_var"]
        tensor([1.])
        >>> weighted_average(models, [1, 1], bn_merge="moments")["bn.running_var"]
        tensor([2.])
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


def float64_chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Flat pieces of two tensors of one shape, side by side, in float64. Reductions then need no large temporaries.

    Example:
        >>> [(left.tolist(), right.tolist()) for left, right in float64_chunks(torch.ones(2), torch.zeros(2))]
        [([1.0, 1.0], [0.0, 0.0])]
    """
    for left, right in zip(
        torch.split(first.reshape(-1), _CHUNK), torch.split(second.reshape(-1), _CHUNK), strict=True
    ):
        yield left.double(), right.double()


def float64_pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """`float64_chunks` of many pairs of tensors, of which small ones come together: few operations for many layers.

    Example:
        >>> pairs = [(torch.ones(2), torch.zeros(2)), (torch.ones(1, 1), torch.full((1, 1), 2.0))]
        >>> [(left.tolist(), right.tolist()) for left, right in float64_pieces(pairs)]
        [([1.0, 1.0, 1.0], [0.0, 0.0, 2.0])]
    """
    waiting: list[tuple[Tensor, Tensor]] = []
    numbers = 0
    for first, second in pairs:
        if numbers + first.numel() > _CHUNK and waiting:
            yield _together(waiting)
            waiting, numbers = [], 0
        if first.numel() > _CHUNK:
            yield from float64_chunks(first, second)
            continue
        waiting.append((first, second))
        numbers += first.numel()
    if waiting:
        yield _together(waiting)


def _together(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    left, right = (torch.cat([tensor.reshape(-1) for tensor in side]).double() for side in zip(*pairs, strict=True))
    return left, right


@functools.lru_cache(4096)
def is_buffer(name: str) -> bool:
    """Whether a key names a BatchNorm buffer. A state dict has no other way to tell parameters from buffers.

    Example:
        >>> is_buffer("layer1.bn.running_mean"), is_buffer("layer1.bn.weight")
        (True, False)
    """
    return any(_is_last_part(name, part) for part in (_RUNNING_MEAN, _RUNNING_VAR, "num_batches_tracked"))


def parameters_of(weights: Weights) -> Weights:
    """Those tensors of a model that training moves: numbers with a fraction that are no BatchNorm statistics.

    Example:
        >>> model = Weights({"w": torch.ones(1), "bn.running_mean": torch.ones(1), "n": torch.ones(1).long()})
        >>> list(parameters_of(model))
        ['w']
    """
    return weights.select(lambda name: weights[name].is_floating_point() and not is_buffer(name))


def _is_last_part(name: str, part: str) -> bool:
    return name.rpartition(".")[2] == part
