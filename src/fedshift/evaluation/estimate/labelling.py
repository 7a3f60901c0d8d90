"""Which samples to have labelled, and what these labels say of a model: intervals for its accuracy and its AUROC.

Samples are drawn at random, or at random within strata of the model's confidence: where it is unsure a label says more.
Intervals hold for the model on the samples that were drawn from, whatever its scores are worth: scores decide how
narrow an interval gets, and never whether it covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.errors import UserError
from fedshift.evaluation.estimate.sums import Numbers, probabilities

LEVEL = 0.9
"""Of the intervals, as of those of `estimate_accuracy`."""
MOST_STRATA, _EACH = 4, 12
"""Most strata, and labels for each of them on average at least: of fewer, strata make intervals wider."""
_WORTH = 0.9
"""Strata are used if they need no more than this share of the labels for the same interval."""
_MOST_SURE = 0.95
"""The model's confidence is taken for no more than this, so that the surest samples are looked at, too."""
_DIGITS = 5
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """Samples to have labelled, in the order in which they are to be.

    Attributes:
        rows: the samples (n,).
        strata: the stratum of each (n,); all 0 if they are drawn at random from all.
        sizes: how many samples each stratum has.
        asked: how many strata were asked for; there are fewer where many samples are as sure.
    """

    rows: Rows
    strata: Rows
    sizes: tuple[int, ...]
    asked: int = 1

    @property
    def stratified(self) -> bool:
        """Whether there is more than one stratum."""
        return len(self.sizes) > 1


@dataclass(frozen=True)
class Interval:
    """A number with its interval of 90 %, in percent."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """How wide the interval is, in points."""
        return self.high - self.low


def draw(
    scores: ArrayLike, number: int, seed: int = 0, *, strata: bool | None = None, most: int = MOST_STRATA
) -> Drawn:
    """Draw samples to have labelled.

    With one seed, the samples of a smaller number are among those of a larger one where the strata are the same.

    Args:
        scores: the model's probabilities (n, classes).
        number: how many; all, if there are no more.
        seed: of the draw.
        strata: whether by confidence; None: where that is expected to need fewer labels by a tenth or more. Each of at
            most four strata gets labels in proportion to its size times the deviation of right and wrong answers in it
            (Neyman, Journal of the Royal Statistical Society 1934), as confidence has it.
        most: strata.

    Raises:
        UserError: there are no samples, or less than one label is asked for.

    Example:
        >>> found = draw([[0.9, 0.1]] * 70 + [[0.5, 0.5]] * 30, 48)
        >>> found.stratified, len(found.rows), len(set(found.rows.tolist()))
        (True, 48, 48)
    """
    shares = probabilities(scores)
    if len(shares) == 0 or number < 1:
        raise UserError("label: there is nothing to draw" if len(shares) == 0 else "number: ask for 1 label or more")
    number = min(number, len(shares))
    order = np.random.default_rng([seed, 29]).permutation(len(shares)).astype(np.int64)
    sure = np.minimum(shares.max(axis=1), _MOST_SURE)
    asked = min(most, number // _EACH)
    stratum = strata_of(shares, asked)
    sizes = np.bincount(stratum)
    spread = np.sqrt(_means(sure * (1 - sure), stratum) + _variances(sure, stratum))
    allotted = _allot(sizes * spread, sizes, number)
    if strata is None:
        alike = sure.mean() * (1 - sure.mean())
        strata = len(sizes) > 1 and _variance(sizes, spread**2, allotted) <= _WORTH * alike / number
    if not strata or len(sizes) < 2:
        return Drawn(order[:number], np.zeros(number, dtype=np.int64), (len(shares),), 1)
    chosen = [order[stratum[order] == which][:count] for which, count in enumerate(allotted)]
    rows = np.concatenate(chosen)
    within = np.concatenate([(np.arange(count) + 0.5) / count for count in allotted])
    turn = np.argsort(within, kind="stable")  # whoever stops early has labelled some of each
    return Drawn(rows[turn], np.repeat(np.arange(len(sizes)), allotted)[turn], tuple(sizes.tolist()), asked)


def accuracy_of(right: ArrayLike, drawn: Drawn, level: float = LEVEL) -> Interval:
    """The accuracy on all samples from labels of some, with Wilson's interval for as many labels as these are worth.

    That is the number of labels at random that would have the variance of the stratified ones, of a finite number of
    samples.

    Source: Wilson, JASA 1927; for strata Yan, Su, Journal of Biopharmaceutical Statistics 2010.

    Args:
        right: whether the model is right (n,), in the order of ``drawn``.
        drawn: the samples that have labels.
        level: of the interval.

    Example:
        >>> found = accuracy_of([True] * 8 + [False] * 2, Drawn(np.arange(10), np.zeros(10, dtype=int), (10**9,)))
        >>> round(found.value, 1), round(found.low, 1), round(found.high, 1)  # as in tables of Wilson's interval
        (80.0, 54.1, 93.1)
    """
    sizes, counts, hits = _count_by_stratum(np.asarray(right, dtype=np.float64), drawn)
    shares = sizes / sizes.sum()
    value = float(shares @ (hits / counts))
    worth = _worth(sizes, counts, hits)
    low, high = _wilson(value, worth, level)
    return Interval(100 * value, 100 * low, 100 * high)


def auroc_of(labels: ArrayLike, scores: ArrayLike, drawn: Drawn, level: float = LEVEL) -> Interval | None:
    """The AUROC on all samples from labels of some; None where they are all of one class.

    Each labelled sample stands for as many as its stratum has to each labelled one. The interval is Newcombe's, with
    Kish's effective numbers of positive and negative samples.

    Source: Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney statistic, Part 2,
    Statistics in Medicine 2006 (method 5); Kish, Survey Sampling, 1965.

    Args:
        labels: 1 where a sample is positive, else 0 (n,).
        scores: the model's score for positive (n,).
        drawn: the samples, as for `accuracy_of`.
        level: of the interval.

    Example:
        >>> some = Drawn(np.arange(4), np.zeros(4, dtype=int), (10**9,))
        >>> auroc_of([0, 0, 1, 1], [0.1, 0.6, 0.4, 0.8], some).value
        75.0
    """
    positive, told = np.asarray(labels) == 1, np.asarray(scores, dtype=np.float64)
    sizes = np.asarray(drawn.sizes, dtype=np.float64)
    counts = np.bincount(drawn.strata, minlength=len(sizes))
    weights = (sizes / np.maximum(counts, 1))[drawn.strata]
    ours, theirs = weights[positive], weights[~positive]
    if len(ours) == 0 or len(theirs) == 0:
        return None
    apart = told[positive][:, None] - told[~positive][None, :]
    wins = (apart > 0) + 0.5 * (apart == 0)
    value = float(ours @ wins @ theirs / (ours.sum() * theirs.sum()))
    numbers = _kish(ours), _kish(theirs)
    low, high = _newcombe(value, *numbers, level)
    return Interval(100 * value, 100 * low, 100 * high)


def labels_needed(interval: Interval, labels: int, samples: int, width: float, level: float = LEVEL) -> int:
    """How many labels, those of before among them, an interval for the accuracy of a given width takes.

    Args:
        interval: the accuracy from the labels so far, or as it is expected.
        labels: how many are there, or were planned.
        samples: how many there are to draw from.
        width: in points, from the low to the high end.
        level: of the interval.

    Raises:
        UserError: the width is not between 0 and 100.

    Example:
        >>> labels_needed(Interval(80.0, 54.1, 93.1), 10, 10**9, 10.0)
        172
    """
    if not 0 < width < 100:
        raise UserError(f"width: {width:g} is not between 0 and 100 points")
    value = interval.value / 100
    worth = _labels_of_width(value, (interval.width or 1e-9) / 100, level)
    each = worth / max(1.0, labels * _of_finite(labels, samples))  # what a label is worth, to one at random
    for number in _doubling(labels, samples):
        if _width(value, each * number * _of_finite(number, samples), level) <= width / 100:
            return _first(
                lambda count: _width(value, each * count * _of_finite(count, samples), level) <= width / 100, number
            )
    return samples


def expected_interval(scores: ArrayLike, drawn: Drawn, accuracy: float, level: float = LEVEL) -> Interval:
    """The interval that labels of these samples will have if the model's accuracy is as expected, in percent.

    Example:
        >>> scores = np.full((200, 2), 0.5)
        >>> round(expected_interval(scores, draw(scores, 50), 80.0).width)
        16
    """
    shares, sizes = probabilities(scores), np.asarray(drawn.sizes, dtype=np.float64)
    counts = np.bincount(drawn.strata, minlength=len(sizes)).astype(np.float64)
    sure = np.minimum(shares.max(axis=1), _MOST_SURE)[drawn.rows]
    within = np.bincount(drawn.strata, weights=sure, minlength=len(sizes)) / counts
    moved = np.clip(within + accuracy / 100 - float(sizes / sizes.sum() @ within), 0.02, 0.98)
    low, high = _wilson(accuracy / 100, _worth(sizes, counts, counts * moved), level)
    return Interval(accuracy, 100 * low, 100 * high)


def strata_of(scores: ArrayLike, number: int) -> Rows:
    """The stratum of each sample (n,): ``number`` of about equal size by confidence, fewer where many are as sure.

    Confidence counts to five digits, so that another machine finds the same strata.

    Example:
        >>> strata_of([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]], 2).tolist()
        [1, 0, 1, 0]
    """
    sure = probabilities(scores).max(axis=1).round(_DIGITS)
    if number < 2:
        return np.zeros(len(sure), dtype=np.int64)
    edges = np.unique(np.quantile(sure, np.arange(1, number) / number))
    return np.unique(np.searchsorted(edges, sure, side="left"), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _means(values: Numbers, stratum: Rows) -> Numbers:
    return np.asarray(np.bincount(stratum, weights=values) / np.bincount(stratum))


def _variances(values: Numbers, stratum: Rows) -> Numbers:
    return np.maximum(_means(values**2, stratum) - _means(values, stratum) ** 2, 0.0)


def _allot(wanted: NDArray[Any], sizes: NDArray[Any], number: int) -> Rows:
    """How many labels each stratum gets: at least two where it has as many, no more than it has, ``number`` in all."""
    least = np.minimum(2, sizes)
    result: Rows = least.astype(np.int64)
    while result.sum() < number:
        lacking = np.where(result < sizes, wanted / (result + 0.5), -1.0)
        result[int(np.argmax(lacking))] += 1
    return result


def _variance(sizes: Numbers | Rows, spread: Numbers, counts: Numbers | Rows) -> float:
    """The variance of a stratified mean; ``spread``: the variance within each stratum."""
    whole = np.asarray(sizes, dtype=np.float64)
    return float(((whole / whole.sum()) ** 2 * spread / counts).sum())


def _count_by_stratum(right: Numbers, drawn: Drawn) -> tuple[Numbers, Numbers, Numbers]:
    """The size, the labels and the right answers of each stratum; one without labels joins its neighbour."""
    result: list[list[float]] = []
    carried = 0.0
    for which, size in enumerate(drawn.sizes):
        here = right[drawn.strata == which]
        if len(here):
            result.append([size + carried, len(here), float(here.sum())])
            carried = 0.0
        elif result:
            result[-1][0] += size
        else:
            carried += size
    if not result:
        raise UserError("label: no sample has a label yet")
    sizes, counts, hits = np.array(result).T
    return sizes, counts, hits


def _worth(sizes: Numbers, counts: Numbers, hits: Numbers) -> float:
    """How many labels at random from endlessly many samples would have the variance of these."""
    shares = sizes / sizes.sum()
    value = float(shares @ (hits / counts))
    left = np.clip((sizes - counts) / np.maximum(sizes - 1, 1), 0.0, 1.0)  # of a finite number of samples
    if len(sizes) == 1:
        return float(counts[0] / max(left[0], 1e-12))
    smooth = (hits + 1) / (counts + 2)  # a stratum in which all are right may still have some that are wrong
    variance = float((shares**2 * left * smooth * (1 - smooth) / counts).sum())
    middle = min(max(value, float(shares @ np.minimum(smooth, 1 - smooth)) / 2), 1 - float(shares @ (1 - smooth)) / 2)
    return middle * (1 - middle) / max(variance, 1e-15)


def _wilson(value: float, worth: float, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (value + z**2 / (2 * worth)) / (1 + z**2 / worth)
    half = z / (1 + z**2 / worth) * math.sqrt(value * (1 - value) / worth + z**2 / (4 * worth**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _width(value: float, worth: float, level: float) -> float:
    low, high = _wilson(value, worth, level)
    return high - low


def _labels_of_width(value: float, width: float, level: float) -> float:
    """For how many labels at random Wilson's interval has this width."""
    low, high = 1e-6, 1e15
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _width(value, middle, level) > width else (low, middle)
    return high


def _of_finite(number: float, samples: int) -> float:
    """By how much more a label is worth since there are no more than so many samples."""
    return (samples - 1) / max(samples - number, 1e-9) if samples > 1 else 1e9


def _doubling(number: int, most: int) -> Sequence[int]:
    doubling = [min(max(1, number), most)]
    while doubling[-1] < most:
        doubling.append(min(2 * doubling[-1], most))
    return doubling


def _first(enough: Callable[[int], bool], most: int) -> int:
    """The smallest number from 1 on that is enough; ``most`` is."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _kish(weights: Numbers) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum())


def _newcombe(value: float, positive: float, negative: float, level: float) -> tuple[float, float]:
    """The AUROCs that are z standard errors from ``value``, the errors taken at these AUROCs themselves."""
    z, mean = NormalDist().inv_cdf((1 + level) / 2), (positive + negative) / 2

    def beyond(other: float) -> bool:
        parts = 1 + (mean - 1) * (1 - other) / (2 - other) + (mean - 1) * other / (1 + other)
        return (value - other) ** 2 > z**2 * other * (1 - other) * parts / (positive * negative)

    return _edge(beyond, value, 0.0), _edge(beyond, value, 1.0)


def _edge(beyond: Callable[[float], bool], inside: float, outside: float) -> float:
    """The last number from ``inside`` towards ``outside`` that is not beyond, by bisection."""
    if not beyond(outside):
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
    return inside
