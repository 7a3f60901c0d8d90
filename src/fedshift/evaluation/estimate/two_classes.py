"""AUROC, sensitivity and specificity at a site without labels, of models that tell two classes apart.

All that is read of a left-out site are counts: of its samples of each class in bins of score (`by_score`), which add up
over sites. Of the site without labels, it is its own samples in these bins, which stay there. Scores are log-odds of
the positive class, less those of the threshold that the model's run chose, so 0 decides at every site.

The estimate is the median of three (`ESTIMATORS`):

* *pooled*: what all left-out sites' samples together have. It holds if only class frequencies moved (label shift:
  Lipton, Wang, Smola, ICML 2018).
* *difference of expectations*: each sample here counts for both classes, by its calibrated probability; the pooled
  value is moved, on the logit scale, by what the same is less here than there. Calibration is Platt's (Advances in
  Large Margin Classifiers, 1999); the expectation is that of CBPE (NannyML), its difference as in DoC (Guillory 2021).
* *two moved bells*: scores here are a mixture of the pooled scores of each class, both moved and stretched alike, with
  unknown frequencies; the mean over all moves, by likelihood and a prior (as Saerens 2002 with moves).

Each left-out site is estimated from the others. How far those estimates are off gives the interval of 90 %, on the
logit scale, with the noise of counting here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.doubtful_rows import with_room

Numbers = NDArray[np.float64]

MEASURES = ("auroc", "sensitivity", "specificity")
EDGES: Numbers = np.linspace(-12.0, 12.0, 97)
SCORES = len(EDGES) + 1
"""Bins of score."""
_MIDDLES: Numbers = np.concatenate(([EDGES[0] - 0.125], (EDGES[1:] + EDGES[:-1]) / 2, [EDGES[-1] + 0.125]))
_FIRST = int(np.searchsorted(_MIDDLES, 0.0))
"""The first bin of those that are called positive."""
_MOVES, _STRETCHES = np.linspace(-2.0, 2.0, 9), np.linspace(-0.6, 0.6, 5)
_MOVE, _STRETCH = 1.0, 0.4
"""Standard deviations of the prior of moves, in log-odds, and of stretches, in logarithms."""
_STEPS, _PLATT_STEPS, _WORTH = 30, 30, 100.0
"""Likelihoods count as of no more samples than the last: real scores are no moved bells."""
FLOOR, SPREAD, PRIOR, LEVEL = 0.5, 1.6, 3, 0.9
"""As in `fedshift.evaluation.estimate.combination`."""
_MOST_SQUARE = 9.0
FEWEST = 10
"""Samples of each class, there and here, as expected here."""
WIDEST = 70.0


@dataclass(frozen=True)
class Range:
    """A measure at a site without labels, in percent, with its interval of 90 %; or None and why there is none."""

    estimate: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    def with_room(self, share: float) -> Range:
        """The same with room for a share of samples of which nothing is known; none if it gets too wide."""
        if self.low is None or self.high is None or share <= 0:
            return self
        low, high = (100 * end for end in with_room(self.low / 100, self.high / 100, share))
        return Range(self.estimate, low, high) if high - low <= WIDEST else _too_wide(low, high)

    def plain(self) -> dict[str, float | str | None]:
        """The same as JSON has it."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "reason": self.reason}


def in_bins(positive: ArrayLike, threshold: float = 0.5) -> NDArray[np.int64]:
    """The bin of each score (n,): log-odds less those of the threshold.

    Args:
        positive: probabilities of the positive class (n,).
        threshold: from which a sample is called positive.

    Example:
        >>> bins = in_bins([0.3, 0.4, 0.6], 0.4)
        >>> (bins >= SCORES // 2).tolist()
        [False, True, True]
    """
    shares = np.asarray(positive, dtype=np.float64)
    odds = _logits(shares) - _logits(np.array(threshold))
    odds = np.where(shares >= threshold, np.maximum(odds, 0.0), np.minimum(odds, -1e-9))  # rounding decides nothing
    return np.asarray(np.searchsorted(EDGES, odds, side="right"))


def by_score(positive: ArrayLike, labels: ArrayLike, threshold: float = 0.5) -> Numbers:
    """Samples of each class in each bin of score (2, SCORES).

    Example:
        >>> by_score([0.3, 0.4, 0.6], [0, 0, 1]).sum(axis=1).tolist()
        [2.0, 1.0]
    """
    counts = np.zeros((2, SCORES))
    np.add.at(counts, (np.asarray(labels, dtype=np.int64), in_bins(positive, threshold)), 1)
    return counts


def measures(counts: Numbers) -> Numbers:
    """AUROC, sensitivity and specificity of counts or weights (2, SCORES), as shares (3,). Scores in a bin are equal.

    Example:
        >>> measures(by_score([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1])).tolist()
        [0.75, 0.5, 0.5]
    """
    negative, positive = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1e-12)
    auroc = positive @ (np.cumsum(negative) - negative / 2)
    return np.array([auroc, positive[_FIRST:].sum(), negative[:_FIRST].sum()])


def pooled_measures(known: Numbers, here: Numbers) -> Numbers:
    """What the left-out sites have, whatever is here.

    Example:
        >>> known = by_score([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1])
        >>> pooled_measures(known, known.sum(axis=0)).tolist()
        [0.75, 0.5, 0.5]
    """
    return measures(known)


def difference_of_expectations(known: Numbers, here: Numbers) -> Numbers:
    """What calibrated probabilities expect, by what it is less here than at the left-out sites.

    Example:
        >>> known = by_score([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1])
        >>> difference_of_expectations(known, known.sum(axis=0)).round(6).tolist()
        [0.75, 0.5, 0.5]
    """
    right = _calibrate(known)
    expected, usual = (_logits(measures(np.stack([bins * (1 - right), bins * right]))) for bins in (here, known.sum(0)))
    return _shares(_logits(measures(known)) + expected - usual)


def moved_scores(known: Numbers, here: Numbers) -> Numbers:
    """What both classes' scores have after the moves and stretches that explain the scores here.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> labels = draw.random(4000) < 0.5
        >>> odds = draw.normal(np.where(labels, 1.0, -1.0))
        >>> known = by_score(1 / (1 + np.exp(-odds)), labels)
        >>> moved = by_score(1 / (1 + np.exp(-odds - 1)), labels)
        >>> bool(np.abs(moved_scores(known, moved.sum(axis=0)) - measures(moved)).max() < 0.06)
        True
    """
    bells = _smooth(known)
    centre = float(_MIDDLES @ bells.mean(axis=0))
    move, stretch = (grid.ravel()[:, None] for grid in np.meshgrid(_MOVES, _STRETCHES))
    before = centre + (_MIDDLES - centre - move) * np.exp(-stretch)
    moved = np.stack([np.interp(before, _MIDDLES, bell) for bell in bells]) + 1e-12  # (2, moves, SCORES)
    moved /= moved.sum(axis=2, keepdims=True)
    share = np.full((len(move), 1), 0.5)
    for _ in range(_STEPS):
        both = share * moved[1] + (1 - share) * moved[0]
        share = np.clip((share * moved[1] / both) @ here[:, None] / here.sum(), 0.01, 0.99)
    both = share * moved[1] + (1 - share) * moved[0]
    likely = np.log(both) @ here * min(1.0, _WORTH / here.sum())
    likely -= ((move / _MOVE) ** 2 + (stretch / _STRETCH) ** 2).ravel() / 2
    weights = np.exp(likely - likely.max())
    values = np.stack([measures(moved[:, number]) for number in range(len(move))])
    return np.asarray(weights @ values / weights.sum())


ESTIMATORS: Mapping[str, Callable[[Numbers, Numbers], Numbers]] = {
    "pooled": pooled_measures,
    "difference of expectations": difference_of_expectations,
    "moved scores": moved_scores,
}
"""Each takes counts of left-out sites (2, SCORES) and bins here (SCORES,), and gives shares (3,)."""


def estimates(left_out: Sequence[Numbers], here: Numbers) -> dict[str, Range]:
    """AUROC, sensitivity and specificity at a site without labels.

    Args:
        left_out: counts of each left-out site (2, SCORES).
        here: the samples without labels in bins (SCORES,).

    Example:
        >>> draw = np.random.default_rng(1)
        >>> def site():
        ...     labels = draw.random(400) < 0.4
        ...     odds = draw.normal(np.where(labels, 0.8, -0.8))
        ...     return by_score(1 / (1 + np.exp(-odds)), labels)
        >>> found = estimates([site(), site(), site()], site().sum(axis=0))["auroc"]
        >>> found.low < 87.1 < found.high  # Φ(1.6 / √2)
        True
    """
    usable = [counts for counts in left_out if tells_rates(counts)]
    whole = np.sum(usable, axis=0) if usable else np.zeros((2, SCORES))
    squares = np.zeros(len(MEASURES))
    if len(usable) > 1:
        squares = np.sum([squares_of(whole - counts, counts) for counts in usable], axis=0)
    return estimates_of(Rates(whole, squares, len(usable)), here)


@dataclass(frozen=True)
class Rates:
    """What left-out sites that have enough samples of two classes say together.

    Attributes:
        by_score: their counts (2, SCORES).
        squares: how far estimates were off at each, squared, in errors that they are given; the sum (3,).
        sites: how many they are.
    """

    by_score: Numbers
    squares: Numbers
    sites: int


def tells_rates(counts: Numbers) -> bool:
    """Whether a site with these counts (2, SCORES) has enough samples of each class.

    Example:
        >>> tells_rates(by_score([0.1, 0.9], [0, 1]))
        False
    """
    return bool(counts.sum(axis=1).min() >= FEWEST)


def estimates_of(known: Rates, here: Numbers) -> dict[str, Range]:
    """As `estimates`, of left-out sites of which only sums are known.

    Example:
        >>> one_site = Rates(np.ones((2, SCORES)), squares=np.zeros(3), sites=1)
        >>> estimates_of(one_site, np.ones(SCORES))["auroc"].reason
        'fewer than 2 left-out sites have 10 samples of each class'
    """
    if known.sites < 2:
        why = f"fewer than 2 left-out sites have {FEWEST} samples of each class"
        return {name: Range(None, reason=why) for name in MEASURES}
    odds, errors = _middle(known.by_score, here)
    factors = np.sqrt((PRIOR + known.squares) / (PRIOR + known.sites))
    numbers = _expected_counts(known.by_score, here)
    result = {}
    for index, name in enumerate(MEASURES):
        result[name] = _range(float(odds[index]), float(factors[index] * errors[index]), name, numbers, known.sites)
    return result


def _middle(known: Numbers, here: Numbers) -> tuple[Numbers, Numbers]:
    """The median of the estimators, and its error from how far they are apart, on the logit scale (3,) each."""
    parts = _logits(np.stack([estimator(known, here) for estimator in ESTIMATORS.values()]))
    return np.median(parts, axis=0), np.hypot(FLOOR, SPREAD * parts.std(axis=0))


def squares_of(others: Numbers, counts: Numbers) -> Numbers:
    """How far estimates from other sites are off at a left-out site, squared, in errors that they are given (3,).

    Args:
        others: counts of the other left-out sites (2, SCORES).
        counts: of this one.

    Example:
        >>> counts = np.stack([np.arange(SCORES)[::-1], np.arange(SCORES)])
        >>> squares_of(counts, counts).tolist()
        [0.0, 0.0, 0.0]
    """
    odds, errors = _middle(others, counts.sum(axis=0))
    truth = measures(counts)
    noise = np.array(
        [_noise(name, float(share), counts.sum(axis=1)) for name, share in zip(MEASURES, truth, strict=True)]
    )
    return np.asarray(np.minimum(np.maximum(0.0, (odds - _logits(truth)) ** 2 - noise) / errors**2, _MOST_SQUARE))


def _expected_counts(known: Numbers, here: Numbers) -> Numbers:
    """Samples of each class that are expected here (2,): by EM over the pooled bells (Saerens 2002)."""
    bells, share = _smooth(known), 0.5
    for _ in range(2 * _STEPS):
        both = share * bells[1] + (1 - share) * bells[0]
        share = float(np.clip(here @ (share * bells[1] / both) / here.sum(), 0.001, 0.999))
    return float(here.sum()) * np.array([1 - share, share])


def _range(odds: float, error: float, name: str, numbers: Numbers, sites: int) -> Range:
    from scipy.special import stdtrit  # takes a second to import

    needed = numbers if name == "auroc" else numbers[[int(name == "sensitivity")]]
    if needed.min() < FEWEST:
        return Range(
            None, reason=f"about {needed.min():.0f} samples of a class are expected here, and it takes {FEWEST}"
        )
    centre = float(_shares(np.array(odds)))
    half = float(stdtrit(PRIOR + sites, (1 + LEVEL) / 2)) * math.sqrt(error**2 + _noise(name, centre, numbers))
    low, high = (float(end) for end in 100 * _shares(np.array([odds - half, odds + half])))
    if high - low > WIDEST:
        return _too_wide(low, high)
    return Range(100 * centre, low, high)


def _too_wide(low: float, high: float) -> Range:
    return Range(None, reason=f"its interval would be {high - low:.0f} points wide")


def _noise(name: str, share: float, numbers: Numbers) -> float:
    """The variance of the logit of a measure that is counted on so many samples of each class."""
    negative, positive = numbers
    if name != "auroc":
        count = positive if name == "sensitivity" else negative
        return float(1 / (count * share + 0.5) + 1 / (count * (1 - share) + 0.5))
    share = min(0.98, max(0.02, share))  # Hanley, McNeil, Radiology 1982
    first, second = share / (2 - share), 2 * share**2 / (1 + share)
    several = (positive - 1) * (first - share**2) + (negative - 1) * (second - share**2)
    return float((share * (1 - share) + several) / (positive * negative) / (share * (1 - share)) ** 2)


def _calibrate(known: Numbers) -> Numbers:
    """The probability of the positive class in each bin (SCORES,), by Platt's line, which begins as the scores are."""
    negative, positive = known
    rows, line = np.stack([_MIDDLES, np.ones(SCORES)]), np.array([1.0, 0.0])
    prior = np.diag([0.1, 0.01])
    for _ in range(_PLATT_STEPS):
        right = _shares(line @ rows)
        slope = rows @ (positive - (positive + negative) * right) - prior @ (line - [1.0, 0.0])
        bend = (rows * ((positive + negative) * right * (1 - right))) @ rows.T + prior
        line = line + np.linalg.solve(bend, slope)
    return _shares(line @ rows)


def _smooth(counts: Numbers) -> Numbers:
    """The distribution of each class's scores, smoothed (2, SCORES)."""
    kernel = np.exp(-((np.arange(-4, 5) / 1.5) ** 2) / 2)
    smooth = np.stack([np.convolve(row, kernel / kernel.sum(), mode="same") for row in counts])
    smooth += 1e-3 * smooth.sum(axis=1, keepdims=True) / SCORES + 1e-12
    return np.asarray(smooth / smooth.sum(axis=1, keepdims=True))


def _logits(shares: Numbers) -> Numbers:
    cut = np.clip(shares, 1e-7, 1 - 1e-7)
    return np.asarray(np.log(cut / (1 - cut)))


def _shares(odds: Numbers) -> Numbers:
    return np.asarray(1 / (1 + np.exp(-np.clip(odds, -40, 40))))
