"""The accuracy at a site without labels: an estimate, an interval of 90 %, or the reasons why there is none.

Each labelled site was left out once, so a model that never saw it has been measured there. Every such site is a case
with known truth: its accuracy is estimated from the others' sums, as that of the site without labels is from all, and
how far those estimates were off says how far this one may be.

The estimate begins with the median of five (`USED`), since each of them is far off somewhere. Where no class
frequencies explain the predictions (`unexplained_share`, beyond what the left-out sites show of each other), inputs
have changed and not only frequencies: then confidence misleads most, and the median of the three that do not read it
alone takes its place.

Where the left-out sites' samples can be read, too, each gives further cases, in which its samples are changed or drawn
again. What they show of the median's errors corrects it (`fedshift.evaluation.estimate.correction`), and so does, in
equal parts, what such cases of public data sets showed (`fedshift.evaluation.estimate.prior`). Then it goes as far
toward the sites' mean as would have been best at them (`fedshift.evaluation.estimate.lean`).

These choices, and the constants below, are the same for all data; benchmarks/estimate.md says how they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.changes import drawn_again
from fedshift.evaluation.estimate.correction import Case, Correction, learn
from fedshift.evaluation.estimate.distances import Apart, beyond, skewed_otherwise
from fedshift.evaluation.estimate.doubtful_rows import of_whole_rows, with_room, worth
from fedshift.evaluation.estimate.estimators import (
    ESTIMATORS,
    agreement,
    distance_of_confidence,
    histogram_binning,
    moved_frequencies,
    unexplained_share,
)
from fedshift.evaluation.estimate.lean import Gaps, best_part
from fedshift.evaluation.estimate.prior import PUBLIC, Prior, Taught, signs, sureness
from fedshift.evaluation.estimate.sums import Numbers, SiteSums, probabilities, sums_of
from fedshift.evaluation.estimate.two_classes import MEASURES, SCORES, Range, Rates, estimates, estimates_of, in_bins
from fedshift.evaluation.metric_entries import ENTRIES

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
MOVED_COUNT = 2.0
"""Cases of moved class frequencies count for so many of changed samples."""
_MOST_SQUARE = 9.0
"""One left-out site's squared error, in such errors, counts for no more."""
FEWEST_SITES, FEWEST_SAMPLES, FEW_EVENTS = 2, 10, 10
UNEXPLAINED, FAR = 0.45, 0.06
"""From these, beyond what the left-out sites show of each other, scores are too unlike for an estimate."""
LOSS, ODD, DISTANT, ALARM = 25.0, 0.3, 0.015, 1.7
"""A shift may be harmful from a sum of ALARM: points below the left-out sites' mean over LOSS, unexplained answers over
ODD, and distance of confidence over DISTANT. About 6 % of unharmed targets reach it."""
WIDEST = 70.0
"""An interval of more points than these says nothing, and no estimate is given."""
LEVEL = 0.9
_MOST_COPIED = 0.8
"""Samples that count as no more than this part of their number are told to be copies."""
_OF_TWO = "it is estimated of two classes only"
SKEWED_FROM = 20
"""Different samples of which skewnesses are compared: those of fewer are chance."""
TURNED_VALUES = (
    "values lie to other sides of their means than at the sites that were left out: columns are mirrored, or others"
)
NOT_LOOKED_AT = "it rests on scores alone: the left-out sites' samples were not looked at again"


@dataclass(frozen=True)
class Answers:
    """What a model says of samples and of those near them.

    Attributes:
        scores: probabilities (n, classes).
        labels: class numbers (n,).
        nearby: see `fedshift.evaluation.estimate.changes.nearby_answers` (n, changes, 2).
        apart: how far the samples are from those of the sites that trained; None if they were not compared.
    """

    scores: NDArray[Any]
    labels: NDArray[np.int64]
    nearby: NDArray[Any]
    apart: Apart | None = None


@dataclass(frozen=True)
class LeftOut:
    """A labelled site and what a model that never saw it says of its samples.

    Attributes:
        scores: probabilities (n, classes).
        labels: class numbers (n,).
        looked_at: of some of its samples: as they are, first, and under changes. Empty if they could not be read.
        threshold: of two classes, the score from which its model calls the second one.
        apart: how far its samples are from those of the sites that trained; None if they could not be read.
    """

    scores: NDArray[Any]
    labels: NDArray[np.int64]
    looked_at: tuple[Answers, ...] = ()
    threshold: float = 0.5
    apart: Apart | None = None


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
        too_unlike: whether it abstains because the samples, or the answers to them, are too unlike; then no model that
            was adapted to them is handed out either.
        looked_at: whether samples of the left-out sites were looked at again, and the estimate corrected by that.
        measures: of two classes AUROC, sensitivity and specificity, each with its interval or why there is none; of
            more classes why there is no AUROC.
        threshold: of these two.
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
    too_unlike: bool = False
    looked_at: bool = False
    measures: Mapping[str, Range] = field(default_factory=dict)
    threshold: float | None = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.estimate is None:
            yield "no estimate: " + self.reasons[0]
        else:
            ends = f"{self.low:.1f} to {self.high:.1f} in {LEVEL:.0%} of cases"
            yield f"accuracy here, estimated: {self.estimate:.1f} % ({ends})"
        for name, measure in self.measures.items():
            if self.abstain and measure.reason == self.reasons[0]:
                continue
            at = "" if name == "auroc" else f" at threshold {self.threshold:.2f}"
            title = f"{ENTRIES[name].title}{at}"
            if measure.estimate is None:
                yield f"{title}: no estimate: {measure.reason}"
            else:
                yield f"{title}, estimated: {measure.estimate:.1f} % ({measure.low:.1f} to {measure.high:.1f})"
        if self.usual is not None:
            sites = f"{self.sites} site" + ("s" if self.sites > 1 else "")
            yield f"accuracy where it was measured: {self.usual:.1f} % (mean of {sites}, each left out in turn)"
        if self.harmful:
            yield "warning: the data differ so much that the model may do much worse here: have some samples labelled"
        if self.looked_at and not self.abstain:
            yield (
                "note: samples of the left-out sites were looked at again; page, tables and verdict rest on scores "
                "alone and may say another number: take this one"
            )
        for reason in self.reasons[1 if self.abstain else 0 :]:
            yield f"note: {reason}"
        if self.parts:
            yield "single estimators: " + ", ".join(f"{name} {value:.1f}" for name, value in self.parts.items())

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
            "too_unlike": self.too_unlike,
            "looked_at": self.looked_at,
            "parts": dict(self.parts),
            "measures": {name: measure.plain() for name, measure in self.measures.items()},
            "threshold": self.threshold,
        }


@dataclass(frozen=True)
class Reading:
    """What estimators say of scores, as shares, and how unlike those of the left-out sites they are.

    Attributes:
        parts: by estimator.
        unexplained, far: see the functions `unexplained_share` and `distance_of_confidence`.
        predicted, frequencies: total variation between the shares of predicted classes here and there, and between
            class frequencies as EM has them and theirs.
        peak: the share of the class that is predicted most, less that there.
    """

    parts: Mapping[str, float]
    unexplained: float
    far: float
    predicted: float
    frequencies: float
    peak: float

    def features(self, nearby: Numbers) -> Numbers:
        """What the correction reads of them and of the mean answers nearby (2 · changes,)."""
        parts = [logit(value) for value in self.parts.values()]
        unlike = [self.unexplained, self.far, self.predicted, self.frequencies, self.peak]
        return np.array([*parts, *unlike, *nearby])

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
    here = np.bincount(shares.argmax(axis=1), minlength=shares.shape[1]) / len(shares)
    there = sums.confusion.sum(axis=0) / sums.samples
    return Reading(
        {name: estimator(sums, shares) for name, estimator in ESTIMATORS.items()},
        unexplained_share(sums, shares),
        distance_of_confidence(sums, shares),
        predicted=float(np.abs(here - there).sum() / 2),
        frequencies=float(np.abs(moved_frequencies(sums, shares) - sums.frequencies).sum() / 2),
        peak=float(here.max() - there.max()),
    )


@dataclass(frozen=True)
class KnownSite:
    """What a left-out site tells of itself where its scores stay there.

    Attributes:
        sums: of what a model that never saw it says of its samples.
        reading: of the same, from the sums of the other left-out sites.
        looks: what it says of some of its samples under changes; empty if they were not looked at.
        apart: how far its samples are from sums of those of the sites that trained; None likewise.
        copied: probability that two of its samples have equal scores, see `share_of_copies`.
    """

    sums: SiteSums
    reading: Reading
    looks: tuple[Look, ...] = ()
    apart: Apart | None = None
    copied: float = 0.0


def estimate_from_sums(
    known: Mapping[str, KnownSite],
    scores: ArrayLike,
    unlike: str | None = None,
    unusual: str | None = None,
    threshold: float = 0.5,
    odd_rows: float = 0.0,
    nearby: NDArray[Any] | None = None,
    apart: Apart | None = None,
    copied: float = 0.0,
) -> Estimate:
    """As `estimate_accuracy`, where of the left-out sites only sums and readings are known. It says the same.

    Args:
        known: by site. What two or more of them say of their samples under changes corrects the estimate.
        scores, unlike, unusual, threshold, odd_rows, nearby, apart: as there.
        copied: probability that two samples are copies, see `share_of_copies`.

    Example:
        >>> estimate_from_sums({}, [[0.9, 0.1], [0.3, 0.7]] * 10).reasons
        ('too few sites: an estimate needs 2 that were left out, and there is 0',)
    """
    supports = {name: site.sums.confusion.sum(axis=1) for name, site in known.items()}
    usual = float(np.mean([site.sums.accuracy for site in known.values()])) if known else None
    return estimate_of_cases(
        len(known),
        _few_events(supports),
        usual,
        Cases.of_known(known) if len(known) >= FEWEST_SITES else None,
        np.asarray(scores, dtype=np.float64),
        unlike=unlike,
        unusual=unusual,
        nearby=nearby,
        threshold=threshold,
        odd_rows=odd_rows,
        apart=apart,
        copied=copied - max((site.copied for site in known.values()), default=0.0),
    )


def estimate_accuracy(
    left_out: Mapping[str, LeftOut],
    scores: ArrayLike,
    others: Sequence[ArrayLike] = (),
    unlike: str | None = None,
    unusual: str | None = None,
    cases: Cases | None = None,
    nearby: NDArray[Any] | None = None,
    threshold: float = 0.5,
    apart: Apart | None = None,
    odd_rows: float = 0.0,
    copied: float = 0.0,
) -> Estimate:
    """Estimate the accuracy of a model at a site without labels.

    Args:
        left_out: by site, what models that never saw it say of its samples.
        scores: what the model says of the samples without labels: probabilities (m, classes).
        others: what models of other seeds say of them.
        unlike: what is too unlike the training data about the inputs; None: nothing.
        unusual: what is unusual about them.
        cases: of the same sites, if they were read before.
        nearby: what the model says near the samples, see `nearby_answers`; None: the median is not corrected.
        threshold: of two classes, the score from which the model calls the second one.
        apart: how far the samples are from those of the left-out sites, where both can be read.
        odd_rows: share of the samples of which the sites know nothing, see `with_room`.
        copied: probability that two samples are copies, beyond that at the left-out sites, see `share_of_copies`.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> def site(n):
        ...     second = draw.beta(0.5, 0.5, n)
        ...     return LeftOut(np.stack([1 - second, second], 1), (draw.random(n) < second).astype(int))
        >>> found = estimate_accuracy({name: site(500) for name in "abc"}, site(500).scores)
        >>> found.abstain, found.low < 81 < found.high  # E max(p, 1 − p) of this beta distribution is 82 %
        (False, True)
    """
    supports = {name: np.bincount(site.labels, minlength=site.scores.shape[1]) for name, site in left_out.items()}
    usual = float(np.mean([_accuracy(site) for site in left_out.values()])) if left_out else None
    if cases is None and len(left_out) >= FEWEST_SITES and len(np.asarray(scores)):
        cases = Cases.of(left_out)
    shares = np.asarray(scores, dtype=np.float64)
    return estimate_of_cases(
        len(left_out),
        _few_events(supports),
        usual,
        cases,
        shares,
        others,
        unlike=unlike,
        unusual=unusual,
        nearby=nearby,
        threshold=threshold,
        apart=apart,
        odd_rows=odd_rows,
        copied=copied,
    )


def estimate_of_cases(
    sites: int,
    few: Sequence[str],
    usual: float | None,
    cases: Cases | None,
    shares: Numbers,
    others: Sequence[ArrayLike] = (),
    *,
    unlike: str | None = None,
    unusual: str | None = None,
    nearby: NDArray[Any] | None = None,
    threshold: float = 0.5,
    apart: Apart | None = None,
    odd_rows: float = 0.0,
    copied: float = 0.0,
) -> Estimate:
    """As `estimate_accuracy`, of left-out sites that were read.

    Args:
        sites: how many there are.
        few: which of them say little, in words.
        usual: their mean accuracy.
        cases: what they say of estimates; None: too few to be read.
        shares: what the model says of the samples without labels: probabilities (m, classes).
        others, unlike, unusual, nearby, threshold, apart, odd_rows, copied: as there.

    Example:
        >>> estimate_of_cases(1, [], None, None, np.array([[0.9, 0.1], [0.3, 0.7]] * 10)).reasons
        ('too few sites: an estimate needs 2 that were left out, and there is 1',)
    """
    known = Estimate(
        None,
        None,
        None,
        abstain=True,
        reasons=(),
        usual=None if usual is None else 100 * usual,
        samples=len(shares),
        sites=sites,
    )
    stop = [*([unlike] if unlike else []), *_impossible(sites, shares)]
    different = worth(len(shares), copied)
    if apart is not None and different < SKEWED_FROM:
        apart = replace(apart, skewed=None)
    notes = [*([unusual] if unusual and not unlike else []), *few, *_repeats(len(shares), different)]
    if cases is None or _cannot_be_read(sites, shares):
        return replace(known, reasons=(*stop, *notes), harmful=bool(unlike), too_unlike=bool(unlike))
    reading = read(cases.whole, shares)
    odd, far = reading.unexplained - cases.unexplained, reading.far - cases.far
    unlike_answers = [*_too_unlike(odd, far), *([TURNED_VALUES] if skewed_otherwise(apart, cases.apart) else [])]
    known, stop = replace(known, too_unlike=bool(unlike or unlike_answers)), [*stop, *unlike_answers]
    centre, low, high = cases.interval(reading, shares, nearby, apart, different)
    low, high = with_room(*of_whole_rows(low, high, different), odd_rows)
    known = replace(known, looked_at=cases.taught is not None and nearby is not None)
    if not stop and 100 * (high - low) > WIDEST:
        why = f", since {unusual}" if unusual and odd_rows else ""
        stop.append(f"its interval would be {100 * (high - low):.0f} points wide{why}")
        notes = [note for note in notes if not why or note != unusual]
    notes += _as_frequent(cases.whole, shares, centre)
    lost = 100 * ((usual or 0.0) - _share(cases.middle(reading, shares, nearby, apart)[0]))  # before it leans to usual
    harmful = bool(unlike) or _is_harmful(cases, (lost / LOSS, odd / ODD, far / DISTANT), apart)
    parts = {name: 100 * value for name, value in reading.parts.items()}
    if others:
        parts["agreement"] = 100 * agreement(np.stack([shares, *map(np.asarray, others)]))
    known = replace(
        known, reasons=(*stop, *notes), harmful=harmful, parts=parts, unexplained=odd, far=far, abstain=bool(stop)
    )
    if cases.by_score or cases.rates is not None:
        measures = _measures(cases, shares, threshold, stop, different, odd_rows)
        known = replace(known, measures=measures, threshold=threshold)
    elif shares.shape[1] > 2:
        known = replace(known, measures={"auroc": Range(None, reason=_OF_TWO)})
    return known if stop else replace(known, estimate=100 * centre, low=100 * low, high=100 * high)


def _as_frequent(sums: SiteSums, shares: Numbers, centre: float) -> list[str]:
    """A note where saying one class of every sample may be right as often as the model is."""
    most = float(moved_frequencies(sums, probabilities(shares)).max())
    if most < centre:
        return []
    return [
        f"if only class frequencies moved, about {100 * most:.0f} % of the samples are of one class: to say it of all "
        "may be right as often as the model"
    ]


def _is_harmful(cases: Cases, by_scores: tuple[float, float, float], apart: Apart | None) -> bool:
    """Whether a shift may be harmful: by what is lost, how odd scores are and, where these are known, by distances."""
    if skewed_otherwise(apart, cases.apart):
        return True
    if apart is None or len(cases.apart) < FEWEST_SITES:
        return sum(by_scores) > ALARM
    signs, prior = harm_signs(cases.apart, apart, by_scores), cases.prior
    if len(signs) == len(prior.weights):
        return float(prior.weights @ signs) > prior.alarm
    return float(prior.sum_weights @ signs) > prior.sum_alarm


def harm_signs(left_out: Sequence[Apart], apart: Apart, by_scores: tuple[float, float, float]) -> Numbers:
    """What the alarm reads where samples can be compared (6,): how far they are (`beyond`), what is lost, what is odd.

    Where only sums over samples are known (5,): all but the nearest.

    Args:
        left_out: how far each left-out site is.
        apart: how far the samples are.
        by_scores: points below the left-out sites' mean over `LOSS`, unexplained answers over `ODD`, and distance of
            confidence over `DISTANT`.

    Example:
        >>> known = Apart(0.8, 0.9, 0.5), Apart(1.0, 1.0, 0.5), Apart(1.2, 1.1, 0.5)
        >>> harm_signs(known, known[1], (5.0, 0.2, 0.1)).round(2).tolist()
        [0.0, 0.0, 0.0, 3.0, 0.2, 0.1]
    """
    lost, *odd = by_scores
    return np.array([*beyond(apart, left_out), min(3.0, max(-2.0, lost)), *odd])


def _measures(
    cases: Cases, shares: Numbers, threshold: float, stop: Sequence[str], different: float, odd_rows: float
) -> dict[str, Range]:
    """AUROC, sensitivity and specificity; none where there is no accuracy, either."""
    if stop:
        return {name: Range(None, reason=stop[0]) for name in MEASURES}
    here = np.bincount(in_bins(probabilities(shares)[:, 1], threshold), minlength=SCORES).astype(np.float64)
    here *= different / len(shares)
    known = estimates(cases.by_score, here) if cases.rates is None else estimates_of(cases.rates, here)
    return {name: measure.with_room(odd_rows) for name, measure in known.items()}


@dataclass(frozen=True)
class Cases:
    """What the left-out sites say of estimates.

    Attributes:
        whole: the sums of all.
        unexplained, far: how unlike they are each other.
        factor: how far the median is off there, in errors that it is given.
        sites: how many there are.
        prior: what other federations taught.
        taught: what corrects the median; None if their samples were not looked at.
        corrected_factor: the same of the corrected median.
        teachers: how many sites teach that.
        odds: by site, the log-odds of the accuracy of a model that never saw it; empty if no site's own is known.
        part: how far the corrected median goes toward their mean.
        by_score: of two classes, each site's samples of each in bins of score.
        apart: how far each site's samples are from the others'; empty if some could not be read.
        rates: of two classes, the same of all sites together, where no site's are known.
    """

    whole: SiteSums
    unexplained: float
    far: float
    factor: float
    sites: int
    prior: Prior = PUBLIC
    taught: Taught | None = None
    corrected_factor: float = 1.0
    teachers: int = 0
    odds: Mapping[str, float] = field(default_factory=dict)
    part: float = 0.0
    by_score: tuple[Numbers, ...] = ()
    apart: tuple[Apart, ...] = ()
    rates: Rates | None = None

    @classmethod
    def of(cls, left_out: Mapping[str, LeftOut], prior: Prior = PUBLIC) -> Cases:
        """Read at least two left-out sites, each from the sums of the others."""
        sums = {name: sums_of(site.scores, site.labels, site.threshold) for name, site in left_out.items()}
        others = {name: reduce(add, (counts for other, counts in sums.items() if other != name)) for name in sums}
        readings = {name: read(others[name], site.scores) for name, site in left_out.items()}
        cases = cls.of_known({name: KnownSite(sums[name], readings[name]) for name in sums})
        apart = tuple(site.apart for site in left_out.values() if site.apart is not None)
        cases = replace(cases, prior=prior, apart=apart if len(apart) == len(left_out) else ())
        if not all(site.looked_at for site in left_out.values()):
            return cases
        return cases.with_looks({name: tuple(looks(others[name], left_out[name], at)) for at, name in enumerate(sums)})

    @classmethod
    def of_known(cls, known: Mapping[str, KnownSite]) -> Cases:
        """The same from sums and readings of two or more left-out sites; corrected where two or more were looked at."""
        sums = {name: site.sums for name, site in known.items()}
        readings = {name: site.reading for name, site in known.items()}
        usual = float(np.mean([reading.unexplained for reading in readings.values()]))
        squares = {name: square_of(site, usual) for name, site in known.items()}
        far = float(np.mean([reading.far for reading in readings.values()]))
        scored = tuple(counts.by_score for counts in sums.values() if counts.by_score is not None)
        whole = reduce(add, sums.values())
        odds = {name: logit(counts.accuracy) for name, counts in sums.items()}
        cases = cls(whole, usual, far, _factor(squares), len(sums), by_score=scored, odds=odds)
        looked = {name: site for name, site in known.items() if site.looks}
        if len(looked) < FEWEST_SITES:
            return cases
        apart = tuple(site.apart for site in looked.values() if site.apart is not None)
        return replace(cases, apart=apart).with_looks({name: site.looks for name, site in looked.items()})

    def with_looks(self, looks: Mapping[str, Sequence[Look]]) -> Cases:
        """Add what these sites' cases teach, and how well each site's are foretold by the others'."""
        known = {name: [look.to_case(self.unexplained) for look in of_site] for name, of_site in looks.items()}
        gaps = {name: self._gaps(name, known) for name in known}
        squares = {
            name: _mean_square(known[name], gaps[name].off(best_part(gaps[other] for other in known if other != name)))
            for name in known
        }
        return replace(
            self,
            taught=_taught(known, self.prior.correction),
            corrected_factor=_factor(squares),
            teachers=len(known),
            part=best_part(gaps.values()),
        )

    def _gaps(self, name: str, known: Mapping[str, Sequence[KnownCase]]) -> Gaps:
        """How far a site's cases are off when the other sites foretell them, and how far from these sites' mean."""
        taught = _taught(known, self.prior.correction, without=name)
        others = float(np.mean([odds for other, odds in self.odds.items() if other != name]))
        errors = [taught.at(item.case.features, item.signs) - item.case.off for item in known[name]]
        gaps = [others - item.middle - taught.at(item.case.features, item.signs) for item in known[name]]
        return Gaps(np.array(errors), np.array(gaps))

    def interval(
        self,
        reading: Reading,
        scores: ArrayLike,
        nearby: NDArray[Any] | None = None,
        apart: Apart | None = None,
        different: float | None = None,
    ) -> tuple[float, float, float]:
        """The estimate and the ends of its interval, for the accuracy on these very samples.

        ``different``: as how many they count; None: all.
        """
        from scipy.special import stdtrit  # takes a second to import

        middle, looked_at = self.middle(reading, scores, nearby, apart)
        factor, sites = (self.corrected_factor, self.teachers) if looked_at else (self.factor, self.sites)
        gap = float(np.mean(list(self.odds.values()))) - middle if looked_at else 0.0
        odds, samples = middle + self.part * gap, len(np.asarray(scores)) if different is None else different
        centre = _share(odds) if looked_at else reading.centre(self.unexplained)
        noise = 1 / (samples * centre + 0.5) + 1 / (samples * (1 - centre) + 0.5)
        between = self.part * (1 - self.part) * gap**2  # variance of a mixture of the two
        half = stdtrit(PRIOR + sites, (1 + LEVEL) / 2) * math.sqrt((factor * reading.error) ** 2 + between + noise)
        return centre, min(centre, _share(odds - half)), max(centre, _share(odds + half))

    def middle(
        self, reading: Reading, scores: ArrayLike, nearby: NDArray[Any] | None = None, apart: Apart | None = None
    ) -> tuple[float, bool]:
        """The log-odds of the median, corrected where samples were looked at, and whether they were."""
        median = logit(reading.centre(self.unexplained))
        if self.taught is None or nearby is None:
            return median, False
        seen = Seen.of(self.whole, reading, scores, nearby, apart)
        return median + self.taught.at(seen.features, seen.signs(median)), True


@dataclass(frozen=True)
class KnownCase:
    """A case of a left-out site, with what its error is compared with.

    Attributes:
        case: what the correction reads of it.
        signs: what the prior reads of it; None if samples were not compared.
        middle: the log-odds of the median.
        accuracy, samples: the truth, and on how many samples.
        error: the standard error of the median on the logit scale.
    """

    case: Case
    signs: Numbers | None
    middle: float
    accuracy: float
    samples: int
    error: float


@dataclass(frozen=True)
class Seen:
    """What is seen of samples without their labels: means over them.

    Attributes:
        reading: what estimators say.
        nearby: mean answers nearby (2 · changes,).
        sure: see `fedshift.evaluation.estimate.prior.sureness`.
        binned: what the estimator `histogram_binning` says.
        spread: of the samples; None if they were not compared.
    """

    reading: Reading
    nearby: Numbers
    sure: tuple[float, float]
    binned: float
    spread: float | None

    @classmethod
    def of(cls, sums: SiteSums, reading: Reading, scores: ArrayLike, nearby: NDArray[Any], apart: Apart | None) -> Seen:
        """Of scores (m, classes) and answers nearby (m, changes, 2), by the sums over labelled sites."""
        shares, spread = probabilities(scores), None if apart is None else apart.spread
        near = nearby.mean(axis=0).ravel()
        return cls(reading, near, sureness(shares), histogram_binning(sums, shares), spread)

    @property
    def features(self) -> Numbers:
        """What the correction reads."""
        return self.reading.features(self.nearby)

    def signs(self, middle: float) -> Numbers | None:
        """What the prior reads; ``middle``: the logit of the median. None if samples were not compared."""
        if self.spread is None:
            return None
        more = logit(self.binned) - middle
        return signs(self.reading.frequencies, self.reading.peak, self.sure, self.nearby, self.spread, more)


@dataclass(frozen=True)
class Look:
    """A case of a left-out site, before it is known how much the sites differ.

    Attributes:
        seen: of its samples.
        accuracy, samples: the truth, and on how many samples.
        moved: whether they were drawn again in other class frequencies.
    """

    seen: Seen
    accuracy: float
    samples: int
    moved: bool

    def to_case(self, usual: float) -> KnownCase:
        """The case; ``usual``: the share of unexplained samples at left-out sites."""
        reading = self.seen.reading
        middle = logit(reading.centre(usual))
        case = Case(self.seen.features, logit(self.accuracy) - middle, MOVED_COUNT if self.moved else 1.0)
        return KnownCase(case, self.seen.signs(middle), middle, self.accuracy, self.samples, reading.error)


def looks(others: SiteSums, site: LeftOut, seed: int) -> Iterator[Look]:
    """The cases of a site: as it is, changed, and drawn again in other class frequencies.

    Args:
        others: the sums of the other left-out sites.
        site: it was looked at.
        seed: decides the frequencies.

    Example:
        >>> scores, labels = np.array([[0.9, 0.1], [0.2, 0.8]] * 20), np.array([0, 1] * 20)
        >>> looked_at = (Answers(scores, labels, np.ones((40, 4, 2))),)
        >>> cases = looks(sums_of(scores, labels), LeftOut(scores, labels, looked_at), seed=0)
        >>> {case.accuracy for case in cases}
        {1.0}
    """
    natural = site.looked_at[0]
    again = drawn_again(natural.labels, natural.scores.shape[1], seed)
    moved = [Answers(natural.scores[rows], natural.labels[rows], natural.nearby[rows], natural.apart) for rows in again]
    for number, answers in enumerate([*site.looked_at, *moved]):
        reading = read(others, answers.scores)
        accuracy = float((answers.scores.argmax(axis=1) == answers.labels).mean())
        seen = Seen.of(others, reading, answers.scores, answers.nearby, answers.apart)
        yield Look(seen, accuracy, len(answers.labels), number >= len(site.looked_at))


def _taught(known: Mapping[str, Sequence[KnownCase]], prior: Correction, without: str = "") -> Taught:
    """What the cases of all sites but one teach, and the prior. The first case of each is the site as it is."""
    others = {name: cases for name, cases in known.items() if name != without}
    natural = [seen for cases in others.values() if (seen := cases[0].signs) is not None]
    usual = np.mean(natural, axis=0) if len(natural) == len(others) else None
    return Taught(learn({name: [item.case for item in cases] for name, cases in others.items()}), prior, usual)


def _mean_square(known: Sequence[KnownCase], off: Numbers) -> float:
    """How far a site's cases are off (n,), squared, in errors that they are given; the mean over them."""
    squares = [
        _square(float(far), item.accuracy, item.samples, item.error) for item, far in zip(known, off, strict=True)
    ]
    return float(np.mean(squares))


def square_of(site: KnownSite, usual: float) -> float:
    """How far the estimate for a left-out site is off, squared, in errors that it is given.

    Args:
        site: its sums, and its reading by the sums of the others.
        usual: the share of unexplained samples at left-out sites.

    Example:
        >>> scores = [[0.9, 0.1], [0.2, 0.8]] * 10
        >>> sums = sums_of(scores, [0, 1] * 10)
        >>> square_of(KnownSite(sums, read(sums, scores)), usual=0.0)  # others that are alike are right
        0.0
    """
    sums, reading = site.sums, site.reading
    off = logit(reading.centre(usual)) - _odds(sums.accuracy, sums.samples)
    return _square(off, sums.accuracy, sums.samples, reading.error)


def _odds(accuracy: float, samples: int) -> float:
    """The logit of an accuracy that was counted on so many samples."""
    return math.log((accuracy * samples + 0.5) / ((1 - accuracy) * samples + 0.5))


def _square(off: float, accuracy: float, samples: int, error: float) -> float:
    """The square of how far an estimate is off on the logit scale, without the noise of counting, in its errors."""
    noise = 1 / (accuracy * samples + 0.5) + 1 / ((1 - accuracy) * samples + 0.5)  # of a binomial's logit
    return min(max(0.0, off**2 - noise) / error**2, _MOST_SQUARE)


def _factor(squares: Mapping[str, float]) -> float:
    return math.sqrt((PRIOR + sum(squares.values())) / (PRIOR + len(squares)))


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


def _cannot_be_read(sites: int, shares: Numbers) -> bool:
    return sites < FEWEST_SITES or len(shares) == 0 or _without_numbers(shares) > 0


def _without_numbers(shares: Numbers) -> int:
    """How many samples get no probabilities: numbers that are too large for the network end as no number."""
    return int(np.count_nonzero(~np.isfinite(shares).all(axis=1)))


def _repeats(samples: int, different: float) -> list[str]:
    """A note where samples are copies of each other."""
    if different > _MOST_COPIED * samples:
        return []
    return [f"the same samples stand there again and again: {samples} count as {different:.0f} different ones"]


def _impossible(sites: int, shares: Numbers) -> list[str]:
    """Why there can be no estimate from so many left-out sites, whatever the numbers."""
    reasons = []
    if sites < FEWEST_SITES:
        reasons.append(f"too few sites: an estimate needs {FEWEST_SITES} that were left out, and there is {sites}")
    if lost := _without_numbers(shares):
        reasons.append(
            f"the model gives no probabilities for {lost} of {len(shares)} samples: their values are too large"
        )
    if len(shares) < FEWEST_SAMPLES:
        reasons.append(f"too few samples: {len(shares)}, and an estimate needs {FEWEST_SAMPLES}")
    elif float(np.ptp(shares, axis=0).max()) < 1e-6:
        reasons.append("the model says the same of every sample")
    return reasons


def _few_events(supports: Mapping[str, NDArray[Any]]) -> list[str]:
    """Which sites have so few samples of a kind that they say little."""
    reasons = []
    for name, counts in supports.items():
        if says_little(counts):
            least = int(np.sort(counts)[-2])
            reasons.append(
                f"site '{name}' says little: beside its most frequent class it has at most {least} of any other"
            )
    return reasons


def says_little(counts: NDArray[Any]) -> bool:
    """Whether a site with so many samples of each class (classes,) has few of all but one of them.

    Example:
        >>> says_little(np.array([40, 9, 0])), says_little(np.array([40, 12, 3]))
        (True, False)
    """
    return int(np.sort(counts)[-2]) < FEW_EVENTS


def _too_unlike(beyond: float, far: float) -> list[str]:
    if beyond > UNEXPLAINED:
        return [
            f"the model's answers are unlike those at the sites that were left out: no class frequencies explain "
            f"{100 * beyond:.0f} % more of them than there"
        ]
    if far > FAR:
        return ["the model is sure of its answers in another way than at the sites that were left out"]
    return []
