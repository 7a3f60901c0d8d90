"""The accuracy at a site without labels: an estimate, an interval of 90 %, or the reasons why there is none.

Each labelled site was left out once, so a model that never saw it has been measured there. Every such site is a case
with known truth: its accuracy is estimated from the others' sums, as that of the site without labels is from all, and
how far those estimates were off says how far this one may be.

The estimate is the median of five (`USED`), since each of them is far off somewhere. Where no class frequencies explain
the predictions (`unexplained`, beyond what the left-out sites show of each other), inputs have changed and not only
frequencies: then confidence misleads most, and the median of the three that do not read it alone takes its
place. These choices, and the constants below, are the same for all data; benchmarks/estimate.md says how they do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.estimators import (
    ESTIMATORS,
    agreement,
    distance_of_confidence,
    unexplained,
)
from fedshift.evaluation.estimate.sums import Numbers, SiteSums, probabilities, sums_of

USED = ("sureness", "thresholded confidence", "transport", "difference of transport", "confusion")
"""Whose median is the estimate where only class frequencies moved."""
OF_CHANGED_INPUTS = ("transport", "difference of transport", "confusion")
"""Whose median is the estimate where inputs changed."""
_FROM, _TO = 0.1, 0.3
"""Shares of unexplained samples, beyond those of the left-out sites, between which the one gives way to the other."""
FLOOR, SPREAD = 0.42, 1.3
"""The error of an estimate, on the logit scale, before any left-out site is looked at: √(FLOOR² + (SPREAD · s)²), where
s is the standard deviation of the five."""
PRIOR = 3
"""As many left-out sites that number counts for."""
_MOST_SQUARE = 9.0
"""One left-out site's squared error, in such errors, counts for no more."""
FEWEST_SITES, FEWEST_SAMPLES, FEW_EVENTS = 2, 10, 10
UNEXPLAINED, FAR = 0.45, 0.06
"""From these, beyond what the left-out sites show of each other, scores are too unlike for an estimate."""
LOSS, ODD, DISTANT, ALARM = 14.0, 0.15, 0.02, 2.5
"""A shift may be harmful from a sum of ALARM: points below the left-out sites' mean over LOSS, unexplained answers over
ODD, and distance of confidence over DISTANT. About 6 % of unharmed targets reach it."""
WIDEST = 70.0
"""An interval of more points than these says nothing, and no estimate is given."""
LEVEL = 0.9


@dataclass(frozen=True)
class LeftOut:
    """A labelled site and what a model that never saw it says of its samples.

    Attributes:
        scores: probabilities (n, classes).
        labels: class numbers (n,).
    """

    scores: NDArray[Any]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """What to expect of a model at a site without labels, in percent.

    Attributes:
        estimate: the accuracy; None if it abstains.
        low, high: its interval of 90 %: the accuracy on these very samples lies within; None if it abstains.
        abstain: whether the data do not allow an estimate.
        reasons: why, and what else to know; each is a sentence's part.
        harmful: whether the model may do much worse here than at the sites that were left out.
        usual: its mean accuracy at these sites; None if there are none.
        parts: what single estimators say, for a closer look.
        samples: number of samples without labels.
        sites: number of left-out sites.
        unexplained, far: how unlike the scores are, beyond what left-out sites show of each other.
    """

    estimate: float | None
    low: float | None
    high: float | None
    abstain: bool
    reasons: tuple[str, ...]
    harmful: bool = False
    usual: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    sites: int = 0
    unexplained: float | None = None
    far: float | None = None

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "abstain": self.abstain,
            "reasons": list(self.reasons),
            "harmful": self.harmful,
            "usual": self.usual,
            "level": 100 * LEVEL,
            "samples": self.samples,
            "sites": self.sites,
            "unexplained": self.unexplained,
            "far": self.far,
            "parts": dict(self.parts),
        }


@dataclass(frozen=True)
class Reading:
    """What estimators say of scores, as shares."""

    parts: Mapping[str, float]
    unexplained: float
    far: float

    def centre(self, usual: float) -> float:
        """The estimate; ``usual``: the share of unexplained samples at left-out sites."""
        weight = min(1.0, max(0.0, (self.unexplained - usual - _FROM) / (_TO - _FROM)))
        median = float(np.median([self.parts[name] for name in USED]))
        changed = float(np.median([self.parts[name] for name in OF_CHANGED_INPUTS]))
        return (1 - weight) * median + weight * changed

    @property
    def error(self) -> float:
        """The standard error of the estimate on the logit scale, from how far the five are apart."""
        return math.hypot(FLOOR, SPREAD * float(np.std([logit(self.parts[name]) for name in USED])))


def read(sums: SiteSums, scores: ArrayLike) -> Reading:
    """What all estimators say of scores (m, classes), from the sums over labelled sites.

    Example:
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> found = read(sums, [[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(found.parts["transport"], 3), round(found.unexplained, 3)
        (0.7, 0.6)
    """
    shares = probabilities(scores)
    return Reading(
        {name: estimator(sums, shares) for name, estimator in ESTIMATORS.items()},
        unexplained(sums, shares),
        distance_of_confidence(sums, shares),
    )


def estimate_accuracy(
    left_out: Mapping[str, LeftOut],
    scores: ArrayLike,
    others: Sequence[ArrayLike] = (),
    unlike: str | None = None,
    unusual: str | None = None,
    cases: Cases | None = None,
) -> Estimate:
    """Estimate the accuracy of a model at a site without labels.

    Args:
        left_out: by site, what models that never saw it say of its samples.
        scores: what the model says of the samples without labels: probabilities (m, classes).
        others: what models of other seeds say of them.
        unlike: what is too unlike the training data about the inputs; None: nothing.
        unusual: what is unusual about them.
        cases: of the same sites, if they were read before.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> def site(n):
        ...     second = draw.beta(0.5, 0.5, n)
        ...     return LeftOut(np.stack([1 - second, second], 1), (draw.random(n) < second).astype(int))
        >>> found = estimate_accuracy({name: site(500) for name in "abc"}, site(500).scores)
        >>> found.abstain, found.low < 81 < found.high  # E max(p, 1 − p) of this beta distribution is 82 %
        (False, True)
    """
    shares = np.asarray(scores, dtype=np.float64)
    usual = float(np.mean([_accuracy(site) for site in left_out.values()])) if left_out else None
    known = Estimate(
        None,
        None,
        None,
        abstain=True,
        reasons=(),
        usual=None if usual is None else 100 * usual,
        samples=len(shares),
        sites=len(left_out),
    )
    stop = [*([unlike] if unlike else []), *_impossible(left_out, shares)]
    notes = [*([unusual] if unusual and not unlike else []), *_few_events(left_out)]
    if len(left_out) < FEWEST_SITES or len(shares) == 0:
        return replace(known, reasons=(*stop, *notes), harmful=bool(unlike))
    cases = cases or Cases.of(left_out)
    found = read(cases.whole, shares)
    beyond, far = found.unexplained - cases.unexplained, found.far - cases.far
    stop += _too_unlike(beyond, far)
    centre, low, high = cases.interval(found, len(shares))
    if not stop and 100 * (high - low) > WIDEST:
        stop.append(f"its interval would be {100 * (high - low):.0f} points wide")
    lost = 100 * ((usual or 0.0) - centre)
    harmful = bool(unlike) or lost / LOSS + beyond / ODD + far / DISTANT > ALARM
    parts = {name: 100 * value for name, value in found.parts.items()}
    if others:
        parts["agreement"] = 100 * agreement(np.stack([shares, *map(np.asarray, others)]))
    known = replace(
        known, reasons=(*stop, *notes), harmful=harmful, parts=parts, unexplained=beyond, far=far, abstain=bool(stop)
    )
    return known if stop else replace(known, estimate=100 * centre, low=100 * low, high=100 * high)


@dataclass(frozen=True)
class Cases:
    """What the left-out sites say of estimates: the sums of all, their usual unlikeness, and a factor of errors."""

    whole: SiteSums
    unexplained: float
    far: float
    factor: float
    sites: int

    @classmethod
    def of(cls, left_out: Mapping[str, LeftOut]) -> Cases:
        """Read at least two left-out sites, each from the sums of the others."""
        sums = {name: sums_of(site.scores, site.labels) for name, site in left_out.items()}
        readings = {
            name: read(reduce(add, (one for other, one in sums.items() if other != name)), site.scores)
            for name, site in left_out.items()
        }
        usual = float(np.mean([one.unexplained for one in readings.values()]))
        squares = 0.0
        for name, one in readings.items():
            n, right = sums[name].samples, sums[name].accuracy * sums[name].samples
            truth = math.log((right + 0.5) / (n - right + 0.5))
            noise = 1 / (right + 0.5) + 1 / (n - right + 0.5)  # of a binomial's logit
            square = max(0.0, (truth - logit(one.centre(usual))) ** 2 - noise) / one.error**2
            squares += min(square, _MOST_SQUARE)
        far = float(np.mean([one.far for one in readings.values()]))
        factor = math.sqrt((PRIOR + squares) / (PRIOR + len(sums)))
        return cls(reduce(add, sums.values()), usual, far, factor, len(sums))

    def interval(self, reading: Reading, samples: int) -> tuple[float, float, float]:
        """The estimate and the ends of its interval, for the accuracy on so many samples."""
        from scipy.special import stdtrit  # takes a second to import

        centre = reading.centre(self.unexplained)
        middle = logit(centre)
        noise = 1 / (samples * centre + 0.5) + 1 / (samples * (1 - centre) + 0.5)
        half = stdtrit(PRIOR + self.sites, (1 + LEVEL) / 2) * math.sqrt((self.factor * reading.error) ** 2 + noise)
        return centre, min(centre, _share(middle - half)), max(centre, _share(middle + half))


def logit(share: float) -> float:
    """The logarithm of the odds of a share, which is cut to 0.02 to 0.98.

    Example:
        >>> logit(0.5), round(logit(1.0), 2)
        (0.0, 3.89)
    """
    cut = min(0.98, max(0.02, share))
    return math.log(cut / (1 - cut))


def _share(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


def _accuracy(site: LeftOut) -> float:
    return float((site.scores.argmax(axis=1) == site.labels).mean())


def _impossible(left_out: Mapping[str, LeftOut], shares: Numbers) -> list[str]:
    """Why there can be no estimate, whatever the numbers."""
    reasons = []
    if len(left_out) < FEWEST_SITES:
        reasons.append(
            f"too few sites: an estimate needs {FEWEST_SITES} that were left out, and there is {len(left_out)}"
        )
    if len(shares) < FEWEST_SAMPLES:
        reasons.append(f"too few samples: {len(shares)}, and an estimate needs {FEWEST_SAMPLES}")
    elif float(np.ptp(shares, axis=0).max()) < 1e-6:
        reasons.append("the model says the same of every sample")
    return reasons


def _few_events(left_out: Mapping[str, LeftOut]) -> list[str]:
    """Which sites have so few samples of a kind that they say little."""
    reasons = []
    for name, site in left_out.items():
        counts = np.bincount(site.labels, minlength=site.scores.shape[1])
        if (least := int(np.sort(counts)[-2])) < FEW_EVENTS:
            reasons.append(
                f"site '{name}' says little: beside its most frequent class it has at most {least} of any other"
            )
    return reasons


def _too_unlike(beyond: float, far: float) -> list[str]:
    if beyond > UNEXPLAINED:
        return [
            f"the model's answers are unlike those at the sites that were left out: no class frequencies explain "
            f"{100 * beyond:.0f} % more of them than there"
        ]
    if far > FAR:
        return ["the model is sure of its answers in another way than at the sites that were left out"]
    return []
