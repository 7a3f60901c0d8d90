"""Robust aggregation: rules whose result a few bad sites cannot change much. n is the number of sites.

``models`` is a list, or an object whose ``__iter__`` reads the models one by one. Functions pass over it several times
and hold at most `AT_ONCE` bytes of it. Numbers have the unit of the weights, squared distances that unit squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.averaging import float64_chunks
from fedshift.weights import Weights

Models = Iterable[Mapping[str, Tensor]]

AT_ONCE = 64 << 20
"""Bytes of all sites' numbers that are held side by side."""

_COLUMNS = 65_536
"""Numbers of a model that are sorted at once: sorting needs three times their memory."""


def coordinate_median(models: Models, at_once: int = AT_ONCE) -> Weights:
    """The coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

    Each number is the median of what the sites have there; of an even number of sites the mean of the two in the
    middle. Fewer than half of the sites can move it only within what the others have. Integers (BatchNorm's counters)
    become their lower median.

    Args:
        models: n ≥ 1 models of equal names, shapes and types.
        at_once: bytes held side by side; each pass over the models takes so many.

    Raises:
        UserError: there is no model, or names, shapes or types differ.

    Example:
        >>> coordinate_median([{"w": torch.tensor([value])} for value in (1.0, 2.0, 900.0)])["w"]
        tensor([2.])
    """

    def middle(columns: Tensor) -> Tensor:
        ordered, count = columns.sort(dim=0).values, len(columns)
        low, high = ordered[(count - 1) // 2], ordered[count // 2]
        return low + (high - low) / 2

    return _by_coordinate(models, middle, at_once)


def trimmed_mean(models: Models, trim: int, at_once: int = AT_ONCE) -> Weights:
    """The coordinate-wise trimmed mean (Yin et al., ICML 2018, Algorithm 1, option II).

    Each number is the mean of what the sites have there without the ``trim`` highest and lowest. Up to ``trim`` bad
    sites can move it only within what the others have. Integers become their lower median.

    Args:
        models: n models of equal names, shapes and types.
        trim: b, sites left out at each end of every number; n must be above 2b.
        at_once: as in `coordinate_median`.

    Raises:
        UserError: n is not above 2b, or as in `coordinate_median`.

    Example:
        >>> trimmed_mean([{"w": torch.tensor([value])} for value in (-50.0, 1.0, 2.0, 900.0)], trim=1)["w"]
        tensor([1.5000])
    """

    def mean(columns: Tensor) -> Tensor:
        check_trim(len(columns), trim)
        kept = columns.sort(dim=0).values[trim : len(columns) - trim]
        # Relative to the lowest: the mean of equal numbers is that number.
        return kept[0] + (kept - kept[0]).mean(dim=0)

    return _by_coordinate(models, mean, at_once)


def check_trim(sites: int, trim: int) -> None:
    """Check that trimming leaves a site.

    Args:
        sites: n.
        trim: b, as in `trimmed_mean`.

    Raises:
        UserError: n is not above 2b.

    Example:
        >>> check_trim(sites=5, trim=2)
    """
    if sites <= 2 * trim:
        raise UserError(f"trim: {trim} at each end leaves none of {sites} sites; lower it")


def squared_distances(models: Models, at_once: int = AT_ONCE) -> Tensor:
    """The squared Euclidean distances between all models, over their float tensors, in float64.

    Differences are taken before they are squared, so a huge model does not blur the distances between the others.

    Returns:
        Of shape (n, n).

    Raises:
        UserError: as `coordinate_median`.

    Example:
        >>> squared_distances([{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}]).tolist()
        [[0.0, 25.0], [25.0, 0.0]]
    """
    like, count = _check_models(models)
    total = torch.zeros(count, count, dtype=torch.float64)
    floats = {name: tensor for name, tensor in like.items() if tensor.is_floating_point()}
    for _, _, stack in _side_by_side(models, floats, count, at_once):
        for columns in torch.split(stack, _COLUMNS, dim=1):
            numbers = columns.double()
            for row in range(count - 1):
                total[row, row + 1 :] += (numbers[row + 1 :] - numbers[row]).square().sum(dim=1).cpu()
    return total + total.T


def krum_scores(distances: Tensor, faulty: int) -> list[float]:
    """Krum's score of each model: the sum of its n − f − 2 smallest squared distances to the others (section 4).

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries. NeurIPS 2017.

    Args:
        distances: squared distances, (n, n).
        faulty: f, bad sites that are expected at most; n must be at least 2f + 3.

    Raises:
        UserError: n is below 2f + 3.

    Example:
        >>> krum_scores(squared_distances([{"w": torch.tensor([value])} for value in (0.0, 1.0, 3.0, 90.0)]), faulty=0)
        [10.0, 5.0, 13.0, 15490.0]
    """
    count = len(distances)
    check_krum(count, faulty)
    others = distances.masked_fill(torch.eye(count, dtype=torch.bool), math.inf).sort(dim=1).values
    return [math.fsum(row[: count - faulty - 2]) for row in others.tolist()]


def krum(distances: Tensor, faulty: int, keep: int = 1) -> list[int]:
    """Which models Krum (``keep`` 1) or multi-Krum takes: those with the smallest scores.

    Args:
        distances: as in `krum_scores`.
        faulty: as in `krum_scores`.
        keep: m, models that are taken, 1 to n − f.

    Returns:
        Their indices, the best first. Of equal scores the lower index comes first.

    Raises:
        UserError: n is below 2f + 3, or m is not in 1 to n − f.

    Example:
        >>> krum(squared_distances([{"w": torch.tensor([value])} for value in (0.0, 1.0, 3.0, 90.0)]), 0, keep=2)
        [1, 0]
    """
    scores = krum_scores(distances, faulty)
    check_krum(len(scores), faulty, keep)
    return sorted(range(len(scores)), key=lambda index: scores[index])[:keep]


def check_krum(sites: int, faulty: int, keep: int = 1) -> None:
    """Check that there are enough sites for Krum, and that ``keep`` need not take a bad one.

    Args:
        sites: n.
        faulty: f, as in `krum_scores`.
        keep: m, as in `krum`.

    Raises:
        UserError: n is below 2f + 3, or m is not in 1 to n − f.

    Example:
        >>> check_krum(sites=5, faulty=1, keep=4)
    """
    if sites < 2 * faulty + 3:
        raise UserError(
            f"faulty: {faulty} bad sites need 2·{faulty} + 3 = {2 * faulty + 3} sites, there are {sites}; lower it"
        )
    if not 1 <= keep <= sites - faulty:
        raise UserError(f"keep: {keep} of {sites} sites with {faulty} bad ones; 1 to {sites - faulty} can be kept")


def update_norm(model: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> float:
    """``‖model − centre‖₂`` over the float tensors of ``model``, in float64.

    Example:
        >>> update_norm({"w": torch.tensor([4.0, 6.0])}, {"w": torch.tensor([1.0, 2.0])})
        5.0
    """
    return math.sqrt(_product(model, centre, model))


def lower_median(values: Sequence[float]) -> float:
    """The median of some numbers; of an even count the lower of the two in the middle, so that a half cannot raise it.

    Example:
        >>> lower_median([4.0, 1.0, 3.0, 9.0])
        3.0
    """
    return sorted(values)[(len(values) - 1) // 2]


def clip_factor(norm: float, bound: float) -> float:
    """``min(1, bound / norm)``: what an update of this norm is multiplied by (Sun et al., 2019, section 4).

    Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? arXiv 1911.07963.

    Example:
        >>> clip_factor(10.0, 2.5), clip_factor(1.0, 2.5), clip_factor(0.0, 0.0)
        (0.25, 1.0, 1.0)
    """
    return 1.0 if norm <= bound else bound / norm


def move_towards(centre: Mapping[str, Tensor], model: Mapping[str, Tensor], factor: float) -> Weights:
    """``centre + factor · (model − centre)`` for the float tensors of ``model``; integers are the model's.

    A factor of 1 gives the model itself, bit for bit.

    Example:
        >>> move_towards({"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}, 0.25)["w"]
        tensor([2.])
    """
    if factor == 1:
        return Weights(model)
    return Weights(
        {
            name: torch.lerp(centre[name].double(), tensor.double(), factor).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in model.items()
        }
    )


def trust_score(model: Mapping[str, Tensor], trusted: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> float:
    """FLTrust's trust in a site: the cosine between its update and the trusted one, or 0 where that is negative.

    Cao, Fang, Liu, Gong: FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping. NDSS 2021, equation 2.

    Args:
        model: what the site sent.
        trusted: what training on trusted data gives, from the same ``centre``.
        centre: what was sent to the sites.

    Returns:
        In [0, 1]; 0 where one of the updates is zero.

    Example:
        >>> zero = {"w": torch.zeros(2)}
        >>> right, left = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([-1.0, 0.0])}
        >>> trust_score(right, right, zero), trust_score(left, right, zero)
        (1.0, 0.0)
    """
    norms = update_norm(model, centre) * update_norm(trusted, centre)
    return min(1.0, max(0.0, _product(model, centre, trusted) / norms)) if norms else 0.0


def _product(first: Mapping[str, Tensor], centre: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The inner product of two updates around ``centre``, over float tensors."""
    parts = []
    for name, tensor in first.items():
        if tensor.is_floating_point():
            pairs = zip(float64_chunks(tensor, centre[name]), float64_chunks(second[name], centre[name]), strict=True)
            parts += [torch.dot(left - middle, right - middle).item() for (left, middle), (right, _) in pairs]
    return math.fsum(parts)


def _by_coordinate(models: Models, rule: Callable[[Tensor], Tensor], at_once: int) -> Weights:
    """The model whose every number is ``rule`` of the sites' numbers there, a column of (n, columns) in float64."""
    like, count = _check_models(models)
    result = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    for name, begin, stack in _side_by_side(models, like, count, at_once):
        whole = result[name].view(-1)
        for columns in torch.split(stack, _COLUMNS, dim=1):
            value = (
                rule(columns.double()) if columns.is_floating_point() else columns.sort(dim=0).values[(count - 1) // 2]
            )
            whole[begin : begin + columns.shape[1]] = value.to(columns.dtype)
            begin += columns.shape[1]
    return Weights(result)


def _check_models(models: Models) -> tuple[dict[str, Tensor], int]:
    """Tensors of the models' shapes and types without memory, and how many models there are."""
    like: dict[str, Tensor] = {}
    count = 0
    for model in models:
        if count:
            Weights(model).check_like(like, f"model {count}")
        else:
            like = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.items()}
        count += 1
    if not count:
        raise UserError("there is no model to aggregate: not one site replied")
    return like, count


def _side_by_side(
    models: Models, like: Mapping[str, Tensor], count: int, at_once: int
) -> Iterator[tuple[str, int, Tensor]]:
    """Pieces of all models side by side: the tensor's name, where the piece begins in it, and (n, numbers).

    Each pass over the models reads as many pieces as fit into ``at_once`` bytes.
    """
    batch: list[tuple[str, int, int]] = []
    room = at_once
    for name, tensor in like.items():
        begin, row = 0, count * tensor.element_size()
        while begin < tensor.numel():
            if room < row and batch:
                yield from _read(models, like, count, batch)
                batch, room = [], at_once
            end = min(tensor.numel(), begin + max(1, room // row))
            batch.append((name, begin, end))
            room -= (end - begin) * row
            begin = end
    yield from _read(models, like, count, batch)


def _read(
    models: Models, like: Mapping[str, Tensor], count: int, batch: Sequence[tuple[str, int, int]]
) -> Iterator[tuple[str, int, Tensor]]:
    """Read these pieces of every tensor, ``(name, begin, end)``, in one pass."""
    stacks = [torch.empty(count, end - begin, dtype=like[name].dtype) for name, begin, end in batch]
    for row, model in enumerate(models):
        for stack, (name, begin, end) in zip(stacks, batch, strict=True):
            stack[row] = model[name].reshape(-1)[begin:end]
    for stack, (name, begin, _) in zip(stacks, batch, strict=True):
        yield name, begin, stack
