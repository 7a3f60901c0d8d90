"""Divergence-weighted aggregation: CSAC (Yuan et al., IEEE TKDE 2023) and its ablations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.averaging import MeanAccumulator, float64_chunks, is_buffer
from fedshift.weights import Weights

Distance = Literal["l2", "l1", "cosine"]
Granularity = Literal["tensor", "module"]
Rule = Literal["divergence", "similarity", "average"]

# 1 − cos of directions that differ by float64 rounding is below about 1e-30, by float32 rounding above about 1e-16.
_COSINE_ROUNDING = 1e-24


def tensor_distance(tensor: Tensor, mean: Tensor, kind: Distance = "l2") -> float:
    """Distance between two tensors of one shape, flattened, accumulated in float64 (CSAC, Table 4).

    Args:
        tensor: t.
        mean: A.
        kind: ``"l2"`` is ``‖t − A‖₂``, ``"l1"`` is ``Σ|t − A|``, ``"cosine"`` is ``1 − cos(t, A)``. The cosine distance
            is at least 0; it is 0 when both tensors are zero and 1 when one is.

    Raises:
        UserError: the shapes differ.

    Example:
        >>> first, second = torch.tensor([3.0, 4.0]), torch.zeros(2)
        >>> tensor_distance(first, second), tensor_distance(first, second, "l1")
        (5.0, 7.0)
    """
    return _distance([(tensor, mean)], kind)


def distances(
    weights: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    kind: Distance = "l2",
    granularity: Granularity = "tensor",
) -> dict[str, float]:
    """Distance ``d_l = dist(G_l, A_l)`` of a site's model to the mean, for every float tensor (CSAC, equations 2 to 4).

    Args:
        weights: G, the site's tensors by name.
        mean: A, the mean's.
        kind: as in `tensor_distance`.
        granularity: ``"tensor"`` measures each entry of the state dict separately, as the released code does.
            ``"module"`` measures once over the concatenated parameters of a module (the keys that agree up to the last
            dot) and uses that for its buffers too. A module with buffers only is measured by them.

    Raises:
        UserError: shapes differ.

    Example:
        >>> model = {"fc.weight": torch.tensor([3.0]), "fc.bias": torch.tensor([4.0])}
        >>> mean = {name: torch.zeros(1) for name in model}
        >>> distances(model, mean)
        {'fc.weight': 3.0, 'fc.bias': 4.0}
        >>> distances(model, mean, granularity="module")
        {'fc.weight': 5.0, 'fc.bias': 5.0}
    """
    floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    if granularity == "tensor":
        return {name: tensor_distance(weights[name], mean[name], kind) for name in floats}
    modules: dict[str, list[str]] = {}
    for name in floats:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    measured: dict[str, float] = {}
    for names in modules.values():
        parameters = [name for name in names if not is_buffer(name)] or names
        together = _distance([(weights[name], mean[name]) for name in parameters], kind)
        measured.update(dict.fromkeys(names, together))
    return {name: measured[name] for name in floats}


def divergence_weights(distances: Sequence[float], rule: Rule = "divergence", power: float = 1.0) -> list[float]:
    """The sites' shares of one layer, from their distances to the mean (CSAC, equation 3 and Table 4).

    Args:
        distances: d_h of each site, at least 0.
        rule: ``"divergence"`` is ``w_h = d_h^p / Σ_j d_j^p``, so the farthest site gets most; shares are equal when all
            distances are 0. ``"similarity"`` is ``w_h ∝ 1/d_h^p``; sites at distance 0 share everything equally.
            ``"average"`` is ``1/H``.
        power: p, above 0; the paper has 1.

    Returns:
        One share per site; they sum to 1.

    Raises:
        UserError: there is no site, a distance is negative or not finite, or the power is not above 0.

    Example:
        >>> [round(share, 6) for share in divergence_weights([1.0, 2.0], power=2.0)]
        [0.2, 0.8]
    """
    count = len(distances)
    if not count:
        raise UserError("there is no site to aggregate: not one distance was given")
    for distance in distances:
        if not (math.isfinite(distance) and distance >= 0):
            raise UserError(f"distance {distance} to the mean model must be a finite number of at least 0")
    if not (math.isfinite(power) and power > 0):
        raise UserError(f"the power of the distances must be a finite number above 0, found {power}")
    largest = max(distances)
    if rule == "average" or largest == 0:
        return [1 / count] * count
    # Division by an extreme keeps sums and reciprocals in range.
    if rule == "divergence":
        shares = [(distance / largest) ** power for distance in distances]
    else:
        smallest = min(distances)
        shares = [(smallest / d) ** power if smallest else float(d == 0) for d in distances]
    total = math.fsum(shares)
    return [share / total for share in shares]


def divergence_aggregate(
    models: Iterable[Mapping[str, Tensor]],
    distance: Distance = "l2",
    granularity: Granularity = "tensor",
    rule: Rule = "divergence",
    power: float = 1.0,
) -> tuple[Weights, dict[str, list[float]]]:
    """Fuse the sites' models layer by layer, ``M_l = Σ_h w_l^h G_l^h``, by distances to the mean (CSAC, eq. 2 to 4).

    Three passes over the models compute the mean ``A_l``, the distances and the fused sum; the rule ``"average"`` needs
    one pass. Each pass holds one model and one float64 sum. So a list works, and so does an object whose ``__iter__``
    reads the models one by one: then memory does not grow with the number of sites.

    Args:
        models: the sites' models. Every pass must yield the same models in the same order.
        distance: as in `tensor_distance`.
        granularity: as in `distances`.
        rule: as in `divergence_weights`.
        power: as in `divergence_weights`.

    Returns:
        The fused model, and for every float tensor the sites' shares in the order of ``models``. Integer tensors take
            the maximum.

    Raises:
        UserError: ``models`` is empty, can be iterated only once, changes between passes, or holds models that do not
            match.
        TrainingDiverged: a tensor holds NaN or infinity.

    Example:
        >>> models = [{"w": torch.tensor([value])} for value in (0.0, 0.0, 3.0)]  # the mean is 1
        >>> fused, shares = divergence_aggregate(models)
        >>> fused["w"], shares
        (tensor([1.5000]), {'w': [0.25, 0.25, 0.5]})
    """
    if isinstance(models, Iterator):
        raise UserError("models can be iterated only once but aggregation passes three times: give a list")
    average = MeanAccumulator()
    count = 0
    for model in models:
        average.add(model, 1.0, f"model {count}")
        count += 1
    # In float64: a rounded mean of two models one unit in the last place apart would equal one of them.
    mean = average.result(None if rule == "average" else torch.float64)
    del average
    mean.check_finite("the mean of the models")
    if rule == "average":
        return mean, {name: [1 / count] * count for name, tensor in mean.items() if tensor.is_floating_point()}
    by_key: dict[str, list[float]] = {}
    for model in models:
        for name, value in distances(model, mean, distance, granularity).items():
            by_key.setdefault(name, []).append(value)
    del mean
    weights = {name: divergence_weights(values, rule, power) for name, values in by_key.items()}
    fused = MeanAccumulator()
    passed = 0
    for model in models:
        if passed < count:
            fused.add(model, {name: row[passed] for name, row in weights.items()}, f"model {passed}")
        passed += 1
    if passed != count or any(len(row) != count for row in weights.values()):
        raise UserError("the number of models changed between passes of aggregation: every pass must yield the same")
    return fused.result(), weights


def distance_weighted(
    weights: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    kind: Distance = "l2",
    granularity: Granularity = "tensor",
    power: float = 1.0,
) -> tuple[Weights, Weights]:
    """A site's terms of the two sums that give equation (2) without any site's model.

    The terms are relative to the mean, so that rounding them as fixed-point numbers moves the result less than the
    models are apart, however small the distances are.

    Args:
        weights: G, the site's tensors by name.
        mean: A, the mean's.
        kind: as in `tensor_distance`.
        granularity: as in `distances`.
        power: as in `divergence_weights`.

    Returns:
        ``d_l^p · (G_l − A_l)`` for each float tensor, and ``d_l^p`` as float64.

    Example:
        >>> weighted, found = distance_weighted({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
        >>> weighted["w"], found["w"].item()
        (tensor([4.]), 2.0)
    """
    result = {name: value**power for name, value in distances(weights, mean, kind, granularity).items()}
    weighted = {
        name: ((weights[name].double() - mean[name].double()) * value).to(weights[name].dtype)
        for name, value in result.items()
    }
    return Weights(weighted), Weights(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}
    )


def fused_from_sums(mean: Weights, weighted: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Weights:
    """``A_l + Σ d_l (G_l − A_l) / Σ d_l`` (2, 3); A_l where all distances are 0 or the tensor is of integers.

    Args:
        mean: A.
        weighted: the sum, or the mean, of the sites' ``d_l^p · (G_l − A_l)``.
        total: that of their ``d_l^p``.

    Example:
        >>> one, zero = torch.tensor(1.0), torch.tensor(0.0)
        >>> fused_from_sums(Weights({"a": one, "b": one}), {"a": one, "b": zero}, {"a": 2 * one, "b": zero})["a"]
        tensor(1.5000)
    """
    fused = {
        name: (mean[name].double() + weighted[name].double() / value.double()).to(mean[name].dtype)
        for name, value in total.items()
        if value.item() > 0
    }
    return mean.merge(fused)


def _distance(pairs: Sequence[tuple[Tensor, Tensor]], kind: Distance) -> float:
    """Distance between the concatenation of the first and of the second members of ``pairs``."""
    for tensor, mean in pairs:
        if tensor.shape != mean.shape:
            raise UserError(f"tensors of shapes {tuple(tensor.shape)} and {tuple(mean.shape)} have no distance")
    if kind == "l1":
        return _total((left - right).abs_().sum() for left, right in _pieces(pairs))
    if kind == "l2":
        return math.sqrt(_total(_square(left - right) for left, right in _pieces(pairs)))
    norms = [math.sqrt(_total(_square(piece[side]) for piece in _pieces(pairs))) for side in (0, 1)]
    if 0 in norms:
        return float(norms[0] != norms[1])
    # 1 − cos(a, b) = ½‖a/‖a‖ − b/‖b‖‖² is never negative, and precise for vectors that are almost parallel.
    half = 0.5 * _total(_square(left / norms[0] - right / norms[1]) for left, right in _pieces(pairs))
    return half if half > _COSINE_ROUNDING or math.isnan(half) else 0.0


def _pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor, mean in pairs:
        yield from float64_chunks(tensor, mean)


def _square(piece: Tensor) -> Tensor:
    return torch.dot(piece, piece)


def _total(parts: Iterable[Tensor]) -> float:
    # One .item() at the end, because each one waits for the accelerator.
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return 0.0 if total is None else total.item()
