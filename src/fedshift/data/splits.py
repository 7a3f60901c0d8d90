"""Splits into training and held-out rows. The same arguments always give the same rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedshift.data.domain import Domain, Rows, part_of
from fedshift.errors import UserError

_BLOCK = 10


TRAIN, TEST = "train", "test"
"""What the cells of a split say, in any case of letters."""


def fixed_split(cells: Sequence[str], locate: Callable[[int], str]) -> tuple[Rows, Rows]:
    """The training and the test rows of a split that the data themselves have.

    UserError if a cell says neither, or no row is on one of the sides. It shows no cell.
    """
    sides = [cell.strip().lower() for cell in cells]
    for row, side in enumerate(sides):
        if side not in (TRAIN, TEST):
            what = "is neither train nor test" if side else "is empty"
            raise UserError(f"{locate(row)}: the cell of data.split {what}: write {TRAIN} or {TEST} in every row")
    result = [
        np.array([row for row, side in enumerate(sides) if side == item], dtype=np.int64) for item in (TRAIN, TEST)
    ]
    return result[0], result[1]


def split_kind(domain: Domain, wanted: Literal["auto", "random", "official"]) -> Literal["random", "official"]:
    """Whether rows are drawn or those of the data's own split, for ``protocol.split``.

    UserError if they would be drawn, and the data fix their test rows.
    """
    if domain.fixed_split and wanted == "random":
        raise UserError(
            f"protocol.split: random, but data.split fixes the test rows of '{domain.name}': leave one of them out"
        )
    if wanted != "auto":
        return wanted
    has_split = domain.train_rows is not None and domain.test_rows is not None
    return "official" if has_split else "random"


def stratified_split(
    labels: npt.NDArray[Any], fraction: float, seed: int, groups: npt.NDArray[np.int64] | None = None
) -> tuple[Rows, Rows]:
    """Hold out the share ``fraction`` of every class.

    Without groups, a class of m samples gives round(m·fraction) of them, but never all, so that it can be learned.

    With groups, the side of a row depends only on its group number and the seed. So a base sample is on the same side
    in every domain that shows it. The share is exact (± 1) over any run of consecutive group numbers, and builders
    number the samples of a class consecutively. All groups of a small class may be held out: moving one would put its
    base sample on both sides.

    Args:
        labels: (n,).
        groups: group number of each row (n,), or None.

    Returns:
        Training rows and held-out rows, both sorted.

    Raises:
        UserError: ``fraction`` is not in [0, 1), or a group number is negative.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"the held-out fraction must be at least 0 and below 1, not {fraction}")
    held = _groups_held_out(groups, fraction, seed) if groups is not None else _rows_held_out(labels, fraction, seed)
    return np.flatnonzero(~held).astype(np.int64), np.flatnonzero(held).astype(np.int64)


def _rows_held_out(labels: npt.NDArray[Any], fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    held = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        number = min(int(np.floor(len(rows) * fraction + 0.5)), len(rows) - 1)
        if number:
            held[np.random.default_rng(_seeds(seed, int(label))).permutation(rows)[:number]] = True
    return held


@lru_cache(1024)
def _seeds(*parts: int) -> np.random.SeedSequence:
    """What a generator is seeded with; many sites begin the same ones, and making it takes longest."""
    return np.random.SeedSequence(parts)


def _groups_held_out(groups: npt.NDArray[np.int64], fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Systematic sampling of the group numbers in an order shuffled within blocks of ten.

    A group's place in this order depends only on its number and the seed. A group is held out where place·fraction
    passes a whole number. So no domain needs to know the groups of another one.
    """
    unique, row_to_group = np.unique(groups, return_inverse=True)
    if len(unique) and unique[0] < 0:
        raise UserError(f"group numbers must not be negative, found {int(unique[0])}: number them from 0")
    block, within = np.divmod(unique, _BLOCK)
    position = np.empty(len(unique), dtype=np.float64)
    for number in np.unique(block):
        order = np.random.default_rng([seed, 7, int(number)]).permutation(_BLOCK)
        chosen = block == number
        position[chosen] = number * _BLOCK + order[within[chosen]]
    start = np.random.default_rng([seed, 11]).uniform(0.1, 0.9)
    held: npt.NDArray[np.bool_] = np.floor((position + 1) * fraction + start) > np.floor(position * fraction + start)
    return held[row_to_group]


def random_split(number: int, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Hold out round(number·fraction) samples, but never all, whatever their classes.

    Returns training rows and held-out rows, both sorted.
    """
    held = max(0, min(int(np.floor(number * fraction + 0.5)), number - 1))
    order = np.random.default_rng([seed, 13]).permutation(number).astype(np.int64)
    return np.sort(order[held:]), np.sort(order[:held])


def part_rows(domain: Domain, fraction: float, seed: int, split: Literal["random", "official"]) -> tuple[Rows, Rows]:
    """Training and held-out rows of one domain.

    A random split holds out a share of every class, or of all samples if labels are no classes. If this holds out
    nothing, as with few samples per class, it draws rows whatever their class.

    Args:
        fraction: share that is held out (random split).
        seed: seed of the draw (random split).
        split: draw rows at random, or take the data set's own split.

    Returns:
        Training rows and held-out rows, both sorted.

    Raises:
        UserError: the domain has no split of its own.
    """
    if split == "random":
        classes = (
            domain.labels
            if domain.labels.dtype.kind == "i" and not domain.unlabelled
            else np.zeros(len(domain), dtype=np.int64)
        )
        train, held_out = stratified_split(classes, fraction, seed, domain.groups)
        if len(held_out) or domain.groups is not None:
            return train, held_out
        return random_split(len(domain), fraction, seed)
    if domain.train_rows is None or domain.test_rows is None:
        raise UserError(f"domain '{domain.name}' has no official split: set protocol.split=random")
    return np.sort(domain.train_rows), np.sort(domain.test_rows)


def cut(domain: Domain, sites: int, by: Literal["chance", "labels"], skew: float) -> list[Domain]:
    """Cut a domain into sites of equal size (± 1), called "name.1", "name.2" and so on.

    By chance, rows of one group stay together, so sizes then differ by a group. By labels, each site draws how often it
    has each class from a Dirichlet distribution around the domain's own shares, with ``skew`` times the number of
    classes as its concentration, and takes what is left where a class runs out.

    ``skew``: the smaller, the more the sites' classes differ. UserError if there are fewer rows or groups than sites,
    or labels are asked for and cannot decide.
    """
    units = np.arange(len(domain), dtype=np.int64) if domain.groups is None else np.unique(domain.groups)
    if len(units) < sites:
        raise UserError(
            f"protocol.sites_each: '{domain.name}' has {len(units)} samples or groups, which is not enough for "
            f"{sites} sites; lower it"
        )
    if by == "labels" and (domain.labels.dtype.kind != "i" or domain.masks is not None or len(units) < len(domain)):
        raise UserError("protocol.cut_by: labels needs classes, and samples without groups; write chance")
    generator = np.random.default_rng([17, zlib.crc32(domain.name.encode())])
    if by == "labels":
        parts = by_site_shares(domain.labels, sites, skew * len(np.unique(domain.labels)), generator)
    else:
        dealt = np.array_split(generator.permutation(units), sites)
        parts = dealt if domain.groups is None else [np.flatnonzero(np.isin(domain.groups, some)) for some in dealt]
    return [part_of(domain, np.sort(rows), f"{domain.name}.{number}") for number, rows in enumerate(parts, 1)]


def by_site_shares(labels: npt.NDArray[Any], sites: int, alpha: float, generator: np.random.Generator) -> list[Rows]:
    """Sites of equal size (± 1), each with shares of the classes ~ Dirichlet(α·p), p being the shares among all.

    A site draws its samples' classes by its shares, and by the shares of those that are left where one runs out.

    Source: Hsu, Qi, Brown (2019).

    Args:
        labels: class numbers (n,).
        alpha: α: the smaller, the more the sites differ.
        generator: draws the shares and the order of the samples.

    Returns:
        The rows of each site.
    """
    classes, counts = np.unique(labels, return_counts=True)
    left = [list(generator.permutation(np.flatnonzero(labels == label))) for label in classes]
    parts = []
    for places in np.array_split(np.arange(len(labels)), sites):
        wanted = generator.dirichlet(alpha * counts / len(labels))
        rows = []
        for _ in places:
            shares = np.where([len(some) > 0 for some in left], wanted + 1e-12, 0.0)
            rows.append(left[generator.choice(len(classes), p=shares / shares.sum())].pop())
        parts.append(np.array(rows, dtype=np.int64))
    return parts
