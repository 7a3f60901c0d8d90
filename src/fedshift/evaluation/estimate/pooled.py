"""Sums over all left-out sites, from which a site without labels estimates, where no site tells its own.

Three sums do, one after the other, of what each site computes by itself:

1. its `SiteSums`, its accuracy, and whether it says little;
2. how unlike its answers are to those of the others, which are the first sum less its own;
3. how far the estimate from the others is off there, in errors that it is given.

Where their inputs can be added, too, two more do for the warning of harm: the `Moments` of its inputs, and how far
these are from those of the others.

The first sum calibrates temperatures and costs, the next two the interval. So the estimate is that of
`fedshift.evaluation.estimate.combination.estimate_from_sums`, up to the rounding of the sums. Which sites say little
is a number then, and no name. Of two classes counts by score are of those sites that have enough of each class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.combination import (
    PRIOR,
    Cases,
    Estimate,
    KnownSite,
    Reading,
    estimate_of_cases,
    says_little,
    square_of,
)
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.input_sums import Moments
from fedshift.evaluation.estimate.sums import BANDS, BINS, TEMPERATURES, Numbers, SiteSums
from fedshift.evaluation.estimate.two_classes import MEASURES, SCORES, Rates, squares_of, tells_rates

FEWEST = 3
"""Sites of a sum: with two, each learns the other's part."""
_HEAD = 5


@dataclass(frozen=True)
class Whole:
    """The first sum.

    Attributes:
        sites: how many there are.
        usual: their mean accuracy, a share.
        little: how many of them say little.
        rated: how many have enough samples of two classes.
        copied: mean probability that two of a site's samples have equal scores.
        sums: of all; without counts by score.
        by_score: of those that are `rated` (2, SCORES); None of more classes.
    """

    sites: int
    usual: float
    little: int
    rated: int
    sums: SiteSums
    by_score: Numbers | None
    copied: float = 0.0

    def others(self, site: SiteSums) -> SiteSums:
        """The sums of the others: all, less a site's own.

        Example:
            >>> from fedshift.evaluation.estimate.sums import sums_of
            >>> first, second = sums_of([[0.9, 0.1]], [0]), sums_of([[0.2, 0.8], [0.4, 0.6]], [1, 1])
            >>> Whole(2, 1.0, 0, 0, first + second, None).others(first).samples
            2
        """
        less = {
            name: np.maximum(getattr(self.sums, name) - getattr(site, name), 0.0)
            for name in ("by_confidence", "losses", "confidences", "answers")
        }
        return SiteSums(self.sums.samples - site.samples, cost=max(0.0, self.sums.cost - site.cost), **less)


@dataclass(frozen=True)
class Distances:
    """How far sites' inputs are from those of the others, by moments over sites.

    Attributes:
        sites: how many there are.
        mean, deviation: of the spread, and of how far means moved (2,), see `Apart`.
    """

    sites: int
    mean: Numbers
    deviation: Numbers

    @classmethod
    def of(cls, total: Numbers, sites: int) -> Distances:
        """From the sum of `distance_part` over so many sites, three or more.

        Example:
            >>> parts = [distance_part(Apart(spread, None, 0.5)) for spread in (0.0, 1.0, 2.0)]
            >>> Distances.of(sum(parts), 3).deviation.tolist()
            [1.0, 0.0]
        """
        mean = total[:2] / sites
        return cls(sites, mean, np.sqrt(np.maximum(total[2:] - sites * mean**2, 0.0) / (sites - 1)))

    @property
    def apart(self) -> tuple[Apart, ...]:
        """As many distances with that mean and deviation: estimates read no more of them."""
        step = self.deviation * math.sqrt((self.sites - 1) / 2)
        ends = (self.mean - step, self.mean + step)
        known = [*ends, *[self.mean] * (self.sites - 2)]
        return tuple(Apart(float(spread), None, float(moved)) for spread, moved in known)


@dataclass(frozen=True)
class Pooled:
    """All three sums.

    Attributes:
        whole: the first.
        unexplained, far: means over sites of how unlike their answers are.
        squares: the sum of squared errors.
        rate_squares: the same of AUROC, sensitivity and specificity (3,).
        distances: how far sites' inputs are from those of the others; None if they were not added.
    """

    whole: Whole
    unexplained: float
    far: float
    squares: float
    rate_squares: Numbers
    distances: Distances | None = None

    @property
    def cases(self) -> Cases:
        """What an estimate reads of left-out sites."""
        whole, rates = self.whole, None
        if whole.by_score is not None:
            rates = Rates(whole.by_score, self.rate_squares, whole.rated)
        factor = math.sqrt((PRIOR + self.squares) / (PRIOR + whole.sites))
        apart = () if self.distances is None else self.distances.apart
        return Cases(whole.sums, self.unexplained, self.far, factor, whole.sites, rates=rates, apart=apart)


def first_part(sums: SiteSums, copied: float = 0.0) -> Numbers:
    """A site's part of the first sum (n,); ``copied``: probability that two of its samples have equal scores.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> first_part(sums_of([[0.9, 0.1], [0.4, 0.6]], [0, 0]))[:4].tolist()  # accuracy, little, rated, samples
        [0.5, 1.0, 0.0, 2.0]
    """
    rated = sums.by_score is not None and tells_rates(sums.by_score)
    little = float(says_little(sums.confusion.sum(axis=1)))
    head = [sums.accuracy, little, float(rated), float(sums.samples), copied]
    parts = [sums.by_confidence, sums.losses, sums.confidences, sums.answers, np.array([sums.cost])]
    if sums.by_score is not None:
        parts.append(sums.by_score * float(rated))
    return np.concatenate([head, *(part.ravel() for part in parts)])


def first_length(classes: int) -> int:
    """How long a part of the first sum is.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> first_length(3) == len(first_part(sums_of([[0.9, 0.1, 0.0]], [0])))
        True
    """
    scores = 2 * SCORES if classes == 2 else 0
    return _HEAD + 2 * BINS + 2 * len(TEMPERATURES) + BANDS * classes**2 + 1 + scores


def whole_of(total: Numbers, sites: int, classes: int) -> Whole:
    """The first sum of so many sites, from its numbers (n,). Counts that rounding moved are put back.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> whole_of(first_part(sums_of([[0.9, 0.1], [0.4, 0.6]], [0, 0])), 1, 2).sums.accuracy
        0.5
    """
    shapes = [(2, BINS), (len(TEMPERATURES),), (len(TEMPERATURES),), (classes, classes, BANDS), (1,)]
    parts, begin = [], _HEAD
    for shape in shapes:
        parts.append(total[begin : begin + math.prod(shape)].reshape(shape))
        begin += math.prod(shape)
    by_confidence, losses, confidences, answers, cost = parts
    samples = round(float(total[3]))
    sums = SiteSums(
        samples, by_confidence.round(), losses, np.minimum(confidences, samples), answers.round(), float(cost[0])
    )
    scores = total[begin:].round().reshape(2, SCORES) if classes == 2 else None
    usual, copied = float(total[0]) / sites, float(total[4]) / sites
    return Whole(sites, usual, round(float(total[1])), round(float(total[2])), sums, scores, copied)


def second_part(reading: Reading) -> Numbers:
    """A site's part of the second sum (2,), from its reading by the sums of the others.

    Example:
        >>> from fedshift.evaluation.estimate.combination import read
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> scores = [[0.9, 0.1], [0.2, 0.8]]
        >>> second_part(read(sums_of(scores, [0, 1]), scores)).round(3) + 0.0  # answers like those of the others
        array([0., 0.])
    """
    return np.array([reading.unexplained, reading.far])


def third_part(whole: Whole, unexplained: float, sums: SiteSums, reading: Reading) -> Numbers:
    """A site's part of the third sum (4,): squared errors of the accuracy and of the rates of two classes.

    Args:
        whole: the first sum.
        unexplained: the mean of the second.
        sums: of the site.
        reading: by the sums of the others.

    Example:
        >>> from fedshift.evaluation.estimate.combination import read
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> scores = [[0.9, 0.1], [0.2, 0.8]] * 10
        >>> sums = sums_of(scores, [0, 1] * 10)
        >>> whole = whole_of(3 * first_part(sums), sites=3, classes=2)
        >>> third_part(whole, 0.0, sums, read(whole.others(sums), scores)).tolist()  # three sites that are alike
        [0.0, 0.0, 0.0, 0.0]
    """
    rates = np.zeros(len(MEASURES))
    mine = sums.by_score
    if whole.by_score is not None and mine is not None and tells_rates(mine) and whole.rated > 1:
        rates = squares_of(np.maximum(whole.by_score - mine, 0.0), mine)
    return np.concatenate([[square_of(KnownSite(sums, reading), unexplained)], rates])


def distance_part(apart: Apart) -> Numbers:
    """A site's part of the sum of distances (4,).

    Example:
        >>> distance_part(Apart(2.0, None, -1.0)).tolist()
        [2.0, -1.0, 4.0, 1.0]
    """
    told = np.array([apart.spread, apart.moved])
    return np.concatenate([told, told**2])


def moments_part(moments: Moments) -> Numbers:
    """A site's part of the sum of inputs (1 + 2 d,).

    Example:
        >>> moments_part(Moments.of(np.array([[2.0], [3.0]]))).tolist()
        [2.0, 5.0, 13.0]
    """
    return np.concatenate([[float(moments.samples)], moments.total, moments.squares])


def moments_of(total: Numbers) -> Moments:
    """The sum of inputs, from its numbers (1 + 2 d,).

    Example:
        >>> moments_of(np.array([2.0, 5.0, 13.0])).mean.tolist()
        [2.5]
    """
    each = np.split(total[1:], 2)
    return Moments(round(float(total[0])), each[0], np.maximum(each[1], 0.0))


def estimate_from_pooled(
    pooled: Pooled,
    scores: ArrayLike,
    unlike: str | None = None,
    unusual: str | None = None,
    threshold: float = 0.5,
    odd_rows: float = 0.0,
    apart: Apart | None = None,
    copied: float = 0.0,
) -> Estimate:
    """As `estimate_from_sums`, where only sums over all left-out sites are known.

    Args:
        pooled: the sums.
        scores, unlike, unusual, threshold, odd_rows, apart, copied: as there.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> scores = [[0.9, 0.1], [0.2, 0.8]] * 10
        >>> whole = whole_of(3 * first_part(sums_of(scores, [0, 1] * 10)), sites=3, classes=2)
        >>> estimate = estimate_from_pooled(Pooled(whole, 0.0, 0.0, 0.0, np.zeros(3)), scores)
        >>> estimate.usual, estimate.sites, estimate.reasons[-1] == SUMMED
        (100.0, 3, True)
    """
    whole = pooled.whole
    notes = [f"{whole.little} of the {whole.sites} sites say little: they have few of all but one class"]
    result: NDArray[Any] = np.asarray(scores, dtype=np.float64)
    estimate = estimate_of_cases(
        whole.sites,
        notes if whole.little else [],
        whole.usual,
        pooled.cases,
        result,
        unlike=unlike,
        unusual=unusual,
        threshold=threshold,
        odd_rows=odd_rows,
        apart=apart,
        copied=copied - whole.copied,
    )
    return replace(estimate, reasons=(*estimate.reasons, SUMMED))


SUMMED = "the left-out sites' numbers were added up under masks: no site's are known"
