"""Samples as they would be if a site measured otherwise, and samples near those of a site.

With *changes* a labelled site makes cases with known truth of its own samples: noise, another scale, columns or parts
of an image missing, …. They show how far estimates are off where inputs are not those of the training.

Source: Deng, Zheng, Are labels always necessary for classifier accuracy evaluation?, CVPR 2021 (a set of changed sets).

Samples *nearby* need no labels: where a model keeps its answers under small changes it is more often right.

Source: Ng, Hulkund, Cho, Ghassemi, Predicting out-of-domain generalization with neighborhood invariance, TMLR 2023.

Both measure values by the mean and the standard deviation at labelled sites, which are sums, and draw from a generator
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = NDArray[Any]
Scores = Callable[[Inputs], NDArray[Any]]

NEARBY = 4
"""Small changes of each sample."""
_NOISE, _SWAPPED, _SHRUNK, _MIXED = 0.5, 0.25, 0.6, 0.65


@dataclass(frozen=True)
class Usual:
    """What values are usual at labelled sites.

    Attributes:
        mean: of each value of a sample (…).
        deviation: the standard deviation of each column of numbers (…), or of all values of images.
    """

    mean: Inputs
    deviation: Inputs

    @classmethod
    def of(cls, sites: Sequence[Inputs]) -> Usual:
        """Of the samples of labelled sites, each (n, …).

        Example:
            >>> Usual.of([np.array([[0.0], [2.0]]), np.array([[4.0]])]).mean.tolist()
            [2.0]
        """
        rows = np.concatenate(list(sites))
        numbers = rows.astype(np.float32)
        return cls(numbers.mean(axis=0), np.asarray(numbers.std() if _is_image(rows) else numbers.std(axis=0)))


def nearby_answers(scores: Scores, inputs: Inputs, usual: Usual, seed: int = 0) -> NDArray[np.float64]:
    """For each small change of each sample: whether the model keeps its answer, and that answer's probability.

    The changes: noise of half a standard deviation; a quarter of the values from other samples of the site; a step
    of 0.4 to the mean; a mixture with 0.35 of another sample. Of tokens: a tenth to a quarter from other samples.

    Args:
        scores: gives the probabilities (n, classes) of inputs.
        inputs: samples (n, …), images of bytes or numbers.
        usual: what is usual at labelled sites.
        seed: of the draws.

    Returns:
        (n, NEARBY, 2).

    Example:
        >>> def sure(rows): return np.stack([rows[:, 0] > 0, rows[:, 0] <= 0], 1).astype(float)
        >>> rows = np.array([[9.0], [8.0], [9.0], [8.0]])
        >>> float(nearby_answers(sure, rows, Usual.of([rows]))[:, :, 0].mean())
        1.0
    """
    draw = np.random.default_rng([seed, 1])
    rows = inputs.astype(np.float32)
    answer = scores(inputs).argmax(axis=1)
    if inputs.dtype == np.int64:
        near = [_swap(inputs, part, draw) for part in (0.1, 0.15, 0.2, _SWAPPED)]
        return _answers(scores, near, answer)
    swapped = draw.random(rows.shape) < _SWAPPED
    small = (
        rows + _NOISE * usual.deviation * draw.normal(size=rows.shape),
        np.where(swapped, rows[draw.permutation(len(rows))], rows),
        usual.mean + _SHRUNK * (rows - usual.mean),
        _MIXED * rows + (1 - _MIXED) * rows[draw.permutation(len(rows))],
    )
    return _answers(scores, [_like(inputs, near) for near in small], answer)


def _answers(scores: Scores, changed: Sequence[Inputs], answer: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each changed form of the samples, whether the model keeps its answer, and that answer's probability."""
    every = np.arange(len(answer))
    answers = []
    for near in changed:
        shares = scores(near)
        answers.append(np.stack([shares.argmax(axis=1) == answer, shares[every, answer]], axis=1))
    return np.stack(answers, axis=1).astype(np.float64)


def changes(inputs: Inputs, usual: Usual, seed: int = 0) -> Iterator[tuple[str, Inputs]]:
    """Samples under each change, by its name.

    Args:
        inputs: samples (n, …): images (n, channels, height, width) of bytes, or numbers.
        usual: what is usual at labelled sites.
        seed: of the draws.

    Example:
        >>> images, rows = np.zeros((2, 1, 4, 4), dtype=np.uint8), np.zeros((2, 3))
        >>> [name for name, _ in changes(images, Usual.of([images]))][:3]
        ['noise 0.15', 'noise 0.4', 'noise 1']
        >>> [name for name, _ in changes(rows, Usual.of([rows]))][-2:]
        ['offset 20 %', 'unit 20 %']
    """
    draw = np.random.default_rng([seed, 2])
    if inputs.dtype == np.int64:
        yield from _of_tokens(inputs, draw)
        return
    made = _of_images if _is_image(inputs) else _of_numbers
    for name, changed in made(inputs.astype(np.float32), usual, draw):
        yield name, _like(inputs, changed)


def _of_images(rows: Inputs, usual: Usual, draw: np.random.Generator) -> Iterator[tuple[str, Inputs]]:
    mean, deviation = usual.mean, usual.deviation
    for part in (0.15, 0.4, 1):
        yield f"noise {part}", rows + part * deviation * draw.normal(size=rows.shape)
    for part in (0.7, 0.45):
        yield f"contrast {part}", mean + part * (rows - mean)
    yield "dark 0.6", 0.6 * rows
    yield "bright", rows + 0.5 * deviation
    for part in (0.25, 0.5):
        yield f"block {part}", _without_block(rows, part, draw)
    down, right, both = (np.roll(rows, step, (2, 3)) for step in ((1, 0), (0, 1), (1, 1)))
    yield "smear", (rows + down + right + both) / 4
    yield "shift", both


def _without_block(rows: Inputs, part: float, draw: np.random.Generator) -> Inputs:
    """Images in which a block of this part of the area is black, somewhere else in each."""
    changed = rows.copy()
    high, wide = (max(1, round(side * part**0.5)) for side in rows.shape[2:])
    for image in changed:
        top, left = (
            draw.integers(0, side - block + 1) for side, block in zip(image.shape[1:], (high, wide), strict=True)
        )
        image[:, top : top + high, left : left + wide] = 0
    return changed


def _of_numbers(rows: Inputs, usual: Usual, draw: np.random.Generator) -> Iterator[tuple[str, Inputs]]:
    mean, deviation, columns = usual.mean, usual.deviation, rows.shape[1:]
    for part in (0.5, 1, 1.5):
        yield f"noise {part}", rows + part * deviation * draw.normal(size=rows.shape)
    for part in (0.5, 2):
        yield f"spread {part}", mean + part * (rows - mean)
    for part in (0.2, 0.45):
        yield f"missing {part:.0%}".replace("%", " %"), np.where(draw.random(columns) < part, mean, rows)
    for part in (0.2, 0.45):
        swapped = rows[draw.permutation(len(rows))]
        yield f"swapped {part:.0%}".replace("%", " %"), np.where(draw.random(columns) < part, swapped, rows)
    some = draw.random(columns) < 0.2
    yield "offset 20 %", np.where(some, rows + draw.choice([-1, 1], columns) * deviation, rows)
    some = draw.random(columns) < 0.2
    yield "unit 20 %", np.where(some, rows * draw.choice([1 / 3, 3], columns), rows)


def _of_tokens(rows: Inputs, draw: np.random.Generator) -> Iterator[tuple[str, Inputs]]:
    """Tokens are no numbers: they change places with those of other samples, or with their neighbours."""
    for part in (0.1, 0.2, 0.45):
        yield f"swapped {part:.0%}".replace("%", " %"), _swap(rows, part, draw)
    yield "shift", np.roll(rows, 1, axis=1)


def _swap(rows: Inputs, part: float, draw: np.random.Generator) -> Inputs:
    """Rows of which this part of the values comes from other rows; where either has no token all stays."""
    others = rows[draw.permutation(len(rows))]
    chosen = (draw.random(rows.shape) < part) & (rows >= 0) & (others >= 0)
    return np.where(chosen, others, rows)


def _is_image(inputs: Inputs) -> bool:
    return inputs.dtype == np.uint8 and inputs.ndim == 4


def _like(inputs: Inputs, changed: Inputs) -> Inputs:
    """Changed values in the type of the samples: bytes stay within 0 to 255."""
    if inputs.dtype == np.uint8:
        return np.clip(np.rint(changed), 0, 255).astype(np.uint8)
    return changed.astype(inputs.dtype)


def drawn_again(labels: NDArray[np.int64], classes: int, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """Rows of a site's samples, drawn so that class frequencies are those of a Dirichlet distribution, six times.

    Example:
        >>> [rows.shape for rows in drawn_again(np.array([0, 1, 1]), 2)]
        [(3,), (3,), (3,), (3,), (3,), (3,)]
    """
    draw = np.random.default_rng([seed, 3])
    there = np.bincount(labels, minlength=classes) > 0
    for concentration in (0.3, 0.3, 1.0, 1.0, 1.0, 3.0):
        shares = np.where(there, draw.dirichlet([concentration] * classes), 0)
        if not shares.sum() > 0:
            continue
        counts = draw.multinomial(len(labels), shares / shares.sum())
        yield np.concatenate([draw.choice(np.flatnonzero(labels == label), n) for label, n in enumerate(counts) if n])
