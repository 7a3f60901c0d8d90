"""How far single samples stand alone in the update of a layer.

The update of a unit (the row of a weight matrix, the filter of a convolution) is a sum over samples. Where one sample
supplies nearly all of it, the update shows that sample: the row of a fully connected layer divided by its bias is the
sample itself. A crafted layer has many such units (Boenisch et al.: When the Curious Abandon Honesty, EuroS&P 2023), or
units whose *differences* show one sample each (Fowl et al.: Robbing the Fed, ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_SAME = 1e-8
"""Energy of what is left of a unit, of its own, below which it is a sum of others."""
_ACTIVE = 1e-3
"""A unit reacts to a sample that contributes more than this part of the largest contribution."""
_FEWEST_PARTNERS = 4
_AT_ONCE = 4_000_000
"""Numbers that are copied at a time."""


def largest_shares(
    contributions: Tensor, together: Sequence[int] = (2, 4, 8, 16), work: float = 2e7, of_all: float = 1.0
) -> Tensor:
    """The largest share that each sample has in an update that an attacker can compute: of a unit, or of several.

    A share is the sample's squared contribution over the sum of all samples' squared contributions. It is computed for
    each unit; for the difference of two units; and for what is left of a unit when several that react to fewer samples
    are taken off. Each unit that is taken off has the factor that leaves least, since the attacker may have scaled it.

    ``contributions``: (samples, units), what each sample adds to each unit's update. ``together``: how many units are
    taken off at once, up to a quarter of the samples. ``work``: numbers that may be looked at for differences of two. A
    unit is compared with those that are most like it, with all of them where ``work`` allows. ``of_all``: how many
    times more samples there are than rows; the others count as those that are given. Returns (samples,), in [0, 1].

    Example:
        >>> apart = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # each unit reacts to one sample
        >>> largest_shares(apart)
        tensor([1., 1.])
        >>> nested = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])  # to three, to two, to one
        >>> largest_shares(nested)
        tensor([1., 1., 1.])
        >>> largest_shares(torch.ones(4, 3))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    samples = len(contributions)
    if not bool(contributions.isfinite().all()):
        return torch.ones(samples, device=contributions.device)  # it cannot be judged
    shares = torch.zeros(samples, device=contributions.device)
    units = contributions.detach().float().t()
    sizes = units.abs().sum(1)
    units = units[sizes > 0] / sizes[sizes > 0, None]  # the scale of a unit does not matter; squares may not overflow
    if len(units):
        shares = torch.maximum(shares, _shares(units, of_all))
    if len(units) > 1:
        for rest in _differences(units, work):
            shares = torch.maximum(shares, _shares(rest, of_all))
        numbers = [number for number in together if number <= samples / 4 and number < len(units)]
        for rest in _without_smaller(units, numbers):
            shares = torch.maximum(shares, _shares(rest, of_all))
    return shares


def exposure(shares: Tensor, part: float = 0.02, fewest: int = 10) -> float:
    """The mean of `largest_shares` over the samples that have a part in the update: how far samples stand alone.

    ``shares``: (samples,). ``part``: samples whose largest share is below this have no part. Else a layer that shows a
    few samples and reacts to no other would look harmless. ``fewest``: the sum is divided by this number at least. In
    honest training, too, a few samples stand alone.

    Example:
        >>> exposure(torch.tensor([1.0] * 20 + [0.0] * 80))
        1.0
        >>> exposure(torch.tensor([1.0, 0.0]))
        0.1
    """
    counted = shares[shares > part]
    return float(counted.sum()) / max(len(counted), fewest)


def _shares(units: Tensor, of_all: float) -> Tensor:
    """The largest share of each sample in ``units`` (units, samples)."""
    squares = units.square()
    others = (squares.sum(1, keepdim=True) - squares).clamp_min(0) * of_all
    return (squares / (squares + others).clamp_min(torch.finfo(squares.dtype).tiny)).amax(0)


def _differences(units: Tensor, work: float) -> Iterator[Tensor]:
    """What is left of units when one that is like them is taken off, for several partners of each."""
    products = units @ units.t()
    energy = products.diagonal()
    likeness = (products.square() / (energy[:, None] * energy)).fill_diagonal_(-1.0)
    number = min(len(units) - 1, max(_FEWEST_PARTNERS, int(work / units.numel())))
    for column in likeness.topk(number, dim=1).indices.unbind(1):
        factor = products.gather(1, column[:, None]) / energy[column, None]
        yield from _nonzero_rows(units - factor * units[column], energy)


def _without_smaller(units: Tensor, numbers: Sequence[int]) -> Iterator[Tensor]:
    """What is left of units when so many units that react to nearly the same samples, and to fewer, are taken off.

    This is how an attacker reads units whose errors differ by class: the others cancel what is common.
    """
    if not numbers:
        return
    active = (units.abs() > _ACTIVE * units.abs().amax(1, keepdim=True)).float()
    common = active @ active.t()
    count = common.diagonal()
    likeness = torch.where(count < count[:, None], common.square() / (count[:, None] * count), -1.0)
    best, order = likeness.topk(max(numbers), dim=1)
    for number in numbers:
        chosen = torch.nonzero(best[:, number - 1] > 0).flatten()
        for some in chosen.split(max(1, _AT_ONCE // (number * units.shape[1]))):  # type: ignore[no-untyped-call]
            unit, taken = units[some], units[order[some, :number]].double()
            products = taken @ taken.transpose(1, 2)
            ridge = 1e-9 * products.diagonal(dim1=1, dim2=2).mean(1)
            products.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
            factors = torch.linalg.solve(products, taken @ unit.double()[:, :, None])
            yield from _nonzero_rows(unit - (factors.transpose(1, 2) @ taken)[:, 0].float(), unit.square().sum(1))


def _nonzero_rows(rest: Tensor, energy: Tensor) -> Iterator[Tensor]:
    """Those rows of which something is left."""
    differs = rest.square().sum(1) > _SAME * energy
    if bool(differs.any()):
        yield rest[differs]
