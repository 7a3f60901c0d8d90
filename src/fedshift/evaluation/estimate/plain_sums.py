"""Sums and readings of sites with labels as JSON has them, for an estimate elsewhere at a site without labels.

They cross the network of a deployment, and lie beside an exported model.

The receiver trusts no number in them. A site's sums are those of `fedshift.evaluation.estimate.sums`: no sample, but
counts of confidences among right and wrong answers, so they leave a site only if its policy lets ``confidences`` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedshift.errors import FedshiftError, in_words
from fedshift.evaluation.estimate.changes import NEARBY
from fedshift.evaluation.estimate.combination import KnownSite, Look, Reading, Seen
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.estimators import ESTIMATORS
from fedshift.evaluation.estimate.input_sums import MOST_VALUES, Moments
from fedshift.evaluation.estimate.pooled import FEWEST, Distances, Pooled, Whole
from fedshift.evaluation.estimate.sums import BANDS, BINS, TEMPERATURES, SiteSums
from fedshift.evaluation.estimate.two_classes import SCORES

MOST_CLASSES = 100
"""Of more, the counts of each class by each other are too many for a header."""
_Count = Annotated[float, Field(ge=0, le=2**53)]
_Amounts = Annotated[tuple[_Count, ...], Field(min_length=len(TEMPERATURES), max_length=len(TEMPERATURES))]
_Bins = Annotated[tuple[_Count, ...], Field(min_length=BINS, max_length=BINS)]
_Bands = Annotated[tuple[_Count, ...], Field(min_length=BANDS, max_length=BANDS)]
_Scores = Annotated[tuple[_Count, ...], Field(min_length=SCORES, max_length=SCORES)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Logarithm = Annotated[float, Field(ge=-1e3, le=1e3)]
_Deviation = Annotated[float, Field(ge=0, le=2e3)]
_Sum = Annotated[float, Field(ge=-1e30, le=1e30)]
_Square = Annotated[float, Field(ge=0, le=1e60)]
_Cube = Annotated[float, Field(ge=-1e90, le=1e90)]
"""Means and deviations are then numbers of float32."""
MOST_LOOKS = 40
"""Cases of a left-out site: changes, and draws in other class frequencies."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GivenSums(_Part):
    """A `SiteSums`, checked."""

    samples: Annotated[int, Field(ge=1, le=2**53)]
    by_confidence: tuple[_Bins, _Bins]
    losses: _Amounts
    confidences: _Amounts
    answers: Annotated[tuple[tuple[_Bands, ...], ...], Field(min_length=2, max_length=MOST_CLASSES)]
    cost: _Count
    by_score: tuple[_Scores, _Scores] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(len(row) != len(self.answers) for row in self.answers):
            raise ValueError("answers are not of each class by each class")
        sums = self.sums
        right = float(np.trace(sums.confusion))
        if not (
            sums.by_confidence.sum() == sums.answers.sum() == self.samples and sums.by_confidence[1].sum() == right
        ):
            raise ValueError("counts do not add up to the samples")
        if max(*self.confidences, self.cost) > self.samples * (1 + 1e-9):
            raise ValueError("sums are larger than the samples allow")
        if sums.by_score is not None and sums.by_score.sum(axis=1).tolist() != sums.confusion.sum(axis=1).tolist():
            raise ValueError("scores are not those of the classes")
        return self

    @property
    def sums(self) -> SiteSums:
        """The sums as estimators read them."""
        return SiteSums(
            self.samples,
            np.array(self.by_confidence),
            np.array(self.losses),
            np.array(self.confidences),
            np.array(self.answers),
            self.cost,
            None if self.by_score is None else np.array(self.by_score),
        )


class GivenReading(_Part):
    """A `Reading`, checked."""

    parts: dict[str, _Share]
    unexplained: _Share
    far: _Share
    predicted: _Share
    frequencies: _Share
    peak: Annotated[float, Field(ge=-1, le=1)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.parts.keys() != ESTIMATORS.keys():
            raise ValueError("parts are not those of the estimators")
        return self

    @property
    def reading(self) -> Reading:
        """The same as estimates read it."""
        return Reading(**self.model_dump())


class GivenLook(_Part):
    """A `Look`, checked."""

    reading: GivenReading
    nearby: Annotated[tuple[_Share, ...], Field(min_length=2 * NEARBY, max_length=2 * NEARBY)]
    sure: tuple[_Share, _Share]
    binned: _Share
    spread: _Logarithm
    accuracy: _Share
    samples: Annotated[int, Field(ge=1, le=2**53)]
    moved: bool

    @property
    def look(self) -> Look:
        """The same as estimates read it."""
        seen = Seen(self.reading.reading, np.array(self.nearby), self.sure, self.binned, self.spread)
        return Look(seen, self.accuracy, self.samples, self.moved)


class GivenLooks(_Part):
    """What a left-out site tells of some of its samples under changes.

    Attributes:
        looks: the samples as they are, first.
        moved, skewed: see `Apart`, as well as the spread of the first.
    """

    looks: Annotated[tuple[GivenLook, ...], Field(min_length=1, max_length=MOST_LOOKS)]
    moved: _Logarithm
    skewed: Annotated[float, Field(ge=-1, le=1)] | None = None

    @property
    def apart(self) -> Apart:
        """How far the samples are from those of the sites that trained."""
        return Apart(self.looks[0].spread, None, self.moved, self.skewed)


class GivenInputs(_Part):
    """The `Moments` of samples, checked."""

    samples: Annotated[int, Field(ge=1, le=2**53)]
    total: Annotated[tuple[_Sum, ...], Field(min_length=1, max_length=MOST_VALUES)]
    squares: Annotated[tuple[_Square, ...], Field(min_length=1, max_length=MOST_VALUES)]
    cubes: Annotated[tuple[_Cube, ...], Field(min_length=1, max_length=MOST_VALUES)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if {len(self.total)} != {len(self.squares), len(self.cubes or self.total)}:
            raise ValueError("total, squares and cubes are not of the same values")
        most = (1 + 1e-6) * self.samples * np.array(self.squares) + 1e-6  # of Cauchy and Schwarz
        if (np.square(self.total) > most).any():
            raise ValueError("squares are smaller than the sums allow")
        return self

    @property
    def moments(self) -> Moments:
        """The same as estimates read it."""
        cubes = None if self.cubes is None else np.array(self.cubes)
        return Moments(self.samples, np.array(self.total), np.array(self.squares), cubes)


class GivenSite(_Part):
    """What a site without labels is told of a left-out site.

    Attributes:
        sums, reading: of its scores.
        looked: of its samples under changes; None where its policy keeps that.
        copied: see `KnownSite`.
    """

    sums: GivenSums
    reading: GivenReading
    looked: GivenLooks | None = None
    copied: _Share = 0.0

    @property
    def known(self) -> KnownSite:
        """The same as estimates read it."""
        sums, reading = self.sums.sums, self.reading.reading
        if self.looked is None:
            return KnownSite(sums, reading, copied=self.copied)
        looks = tuple(look.look for look in self.looked.looks)
        return KnownSite(sums, reading, looks, self.looked.apart, self.copied)


class GivenWhole(_Part):
    """A `Whole`, checked."""

    sites: Annotated[int, Field(ge=FEWEST, le=100_000)]
    usual: _Share
    little: _Count
    rated: Annotated[int, Field(ge=0, le=100_000)]
    sums: GivenSums
    by_score: tuple[_Scores, _Scores] | None = None
    copied: _Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if max(self.rated, self.little) > self.sites:
            raise ValueError("more sites are counted than there are")
        if (self.by_score is not None) != (len(self.sums.answers) == 2):
            raise ValueError("counts by score are of two classes")
        return self

    @property
    def whole(self) -> Whole:
        """The same as estimates read it."""
        scores = None if self.by_score is None else np.array(self.by_score)
        return Whole(self.sites, self.usual, round(self.little), self.rated, self.sums.sums, scores, self.copied)


class GivenDistances(_Part):
    """The `Distances` of sites, checked."""

    sites: Annotated[int, Field(ge=FEWEST, le=100_000)]
    mean: tuple[_Logarithm, _Logarithm]
    deviation: tuple[_Deviation, _Deviation]

    @property
    def distances(self) -> Distances:
        """The same as estimates read it."""
        return Distances(self.sites, np.array(self.mean), np.array(self.deviation))


class GivenPooled(_Part):
    """A `Pooled`, checked."""

    whole: GivenWhole
    unexplained: _Share
    far: _Share
    squares: _Count
    rate_squares: tuple[_Count, _Count, _Count]
    distances: GivenDistances | None = None

    @property
    def pooled(self) -> Pooled:
        """The same as estimates read it."""
        distances = None if self.distances is None else self.distances.distances
        squares = self.squares, np.array(self.rate_squares)
        return Pooled(self.whole.whole, self.unexplained, self.far, *squares, distances)


def given_whole(whole: Whole) -> GivenWhole:
    """The first sum as a message holds it.

    Raises:
        FedshiftError: its numbers do not fit each other, so masks were not those of one sum, or a site lied.

    Example:
        >>> from fedshift.evaluation.estimate.pooled import first_part, whole_of
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> whole = whole_of(3 * first_part(sums_of([[0.9, 0.1]], [0])), sites=3, classes=2)
        >>> given_whole(whole).whole.sums.samples
        3
    """
    scores = None if whole.by_score is None else whole.by_score.tolist()
    plain = {
        "sites": whole.sites,
        "usual": _within(whole.usual),
        "little": whole.little,
        "rated": whole.rated,
        "sums": plain_sums(whole.sums),
        "by_score": scores,
        "copied": _within(whole.copied),
    }
    return _parse(GivenWhole, plain)


def given_pooled(pooled: Pooled) -> GivenPooled:
    """All three sums as a message holds them.

    Raises:
        FedshiftError: as `given_whole`.

    Example:
        >>> from fedshift.evaluation.estimate.pooled import first_part, whole_of
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> whole = whole_of(3 * first_part(sums_of([[0.9, 0.1]], [0])), sites=3, classes=2)
        >>> given_pooled(Pooled(whole, 0.1, 0.0, 2.0, np.zeros(3))).pooled.squares
        2.0
    """
    plain = {
        "whole": given_whole(pooled.whole).model_dump(mode="json"),
        "unexplained": _within(pooled.unexplained),
        "far": _within(pooled.far),
        "squares": max(0.0, pooled.squares),
        "rate_squares": np.maximum(pooled.rate_squares, 0.0).tolist(),
    }
    return _parse(GivenPooled, plain)


def given_distances(distances: Distances) -> GivenDistances:
    """Distances as a message holds them.

    Raises:
        FedshiftError: as `given_whole`.

    Example:
        >>> given_distances(Distances(3, np.zeros(2), np.ones(2))).distances.sites
        3
    """
    mean, deviation = distances.mean.tolist(), distances.deviation.tolist()
    return _parse(GivenDistances, {"sites": distances.sites, "mean": mean, "deviation": deviation})


def given_inputs(moments: Moments) -> GivenInputs:
    """Moments as a message holds them.

    Raises:
        FedshiftError: as `given_whole`.

    Example:
        >>> given_inputs(Moments.of(np.array([[2.0], [3.0]]))).moments.samples
        2
    """
    return _parse(GivenInputs, plain_inputs(moments))


_G = TypeVar("_G", bound=_Part)


def _parse(kind: type[_G], plain: dict[str, Any]) -> _G:
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise FedshiftError(f"sums of left-out sites do not fit each other: {in_words(error.errors()[0])}") from None


def plain_sums(sums: SiteSums) -> dict[str, Any]:
    """Sums as a message holds them.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> plain_sums(sums_of([[0.9, 0.1], [0.4, 0.6]], [0, 1]))["samples"]
        2
    """
    return {
        "samples": sums.samples,
        "by_confidence": sums.by_confidence.tolist(),
        "losses": sums.losses.tolist(),
        "confidences": sums.confidences.tolist(),
        "answers": sums.answers.tolist(),
        "cost": sums.cost,
        **({} if sums.by_score is None else {"by_score": sums.by_score.tolist()}),
    }


def plain_inputs(moments: Moments) -> dict[str, Any]:
    """Moments as a message holds them.

    Example:
        >>> plain_inputs(Moments.of(np.array([[2.0], [3.0]])))
        {'samples': 2, 'total': [5.0], 'squares': [13.0], 'cubes': [35.0]}
    """
    sums = {"samples": moments.samples, "total": moments.total.tolist(), "squares": moments.squares.tolist()}
    return sums if moments.cubes is None else {**sums, "cubes": moments.cubes.tolist()}


def plain_looks(looks: Sequence[Look], apart: Apart) -> dict[str, Any]:
    """Cases of a site as a message holds them; ``apart``: of its samples as they are.

    Example:
        >>> plain_looks([], Apart(0.0, None, -1.0))
        {'looks': [], 'moved': -1.0, 'skewed': None}
    """
    skewed = None if apart.skewed is None else max(-1.0, min(1.0, apart.skewed))
    return {"looks": [_plain_look(look) for look in looks], "moved": apart.moved, "skewed": skewed}


def _plain_look(look: Look) -> dict[str, Any]:
    seen = look.seen
    return {
        "reading": plain_reading(seen.reading),
        "nearby": [_within(share) for share in seen.nearby],
        "sure": [_within(share) for share in seen.sure],
        "binned": _within(seen.binned),
        "spread": seen.spread,
        "accuracy": look.accuracy,
        "samples": look.samples,
        "moved": look.moved,
    }


def plain_reading(reading: Reading) -> dict[str, Any]:
    """A reading as a message holds it; shares that rounding put beyond 0 or 1 are put back.

    Example:
        >>> plain_reading(Reading({}, 1.0000001, 0.0, 0.5, 0.5, 0.9))["unexplained"]
        1.0
    """
    shares = {name: _within(getattr(reading, name)) for name in ("unexplained", "far", "predicted", "frequencies")}
    parts = {name: _within(value) for name, value in reading.parts.items()}
    return {"parts": parts, **shares, "peak": max(-1.0, min(1.0, reading.peak))}


def _within(share: float) -> float:
    return float(max(0.0, min(1.0, share)))


def check_classes(sums: GivenSums, classes: int) -> None:
    """Raise FedshiftError if sums are of another number of classes.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> check_classes(GivenSums.model_validate(plain_sums(sums_of([[0.9, 0.1]], [0]))), 2)
    """
    if len(sums.answers) != classes:
        raise FedshiftError(f"its sums of confidences are of {len(sums.answers)} classes, not {classes}")


def known_sites(given: Mapping[str, GivenSite], classes: int) -> dict[str, KnownSite]:
    """What a message says of left-out sites, by name.

    Raises:
        FedshiftError: they are of other classes.

    Example:
        >>> known_sites({}, 2)
        {}
    """
    if any(len(site.sums.answers) != classes for site in given.values()):
        raise FedshiftError(f"sums of confidences are not of {classes} classes")
    return {name[:200]: site.known for name, site in given.items()}
