"""Whether samples to predict look like those that a model was trained on, by what the model file says of these.

A model file holds sums over all training samples, as means and deviations, and the known categories. No value of a
single sample is in it. So the range of a column is its mean ± 5 deviations: by Chebyshev's inequality at most 1 in 25
training values lies outside, whatever their distribution, which is less than the share that is reported. For less than
20 rows it is the mean ± 10 deviations. And columns
as wholes are compared by the overlap (Bhattacharyya coefficient) of two normal distributions with their means and
deviations: 1 for the same ones, 0.6 for means that are two deviations apart, less than 0.01 for other units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedshift.data.domain import Preprocessing
from fedshift.data.table_files import Columns, canonical, is_missing
from fedshift.data.tables import CategoricalColumn, TableEncoding, numbers
from fedshift.errors import UserError
from fedshift.text import one_line

DEVIATIONS, OF_FEW = 5.0, 10.0
"""A value farther from the mean than so many deviations is outside the range of the training data; the second of less
than 20 rows, of which a single one would be reported."""
REPORTED, REFUSED = 0.05, 0.5
"""Shares of rows with an unknown category, outside the range, or missing where no training value was, in one column."""
OVERLAP_REPORTED, OVERLAP_REFUSED = 0.5, 0.1
"""Overlaps with the training data, of one column."""
FEWEST, ENOUGH = 10, 20
"""Rows from which data are refused, and values from which a column as a whole is compared."""
MANY = 100
"""Rows from which a column is unusual if it has no value, where some training rows had none either, or if its values
are less spread than in training: the few far ones of a skewed column can be absent from fewer rows."""
_MOST_COLUMNS = 3
_MOST_PIXELS = 1
"""Images whose brightest pixel is no brighter hold numbers from 0 to 1."""
LOOKED_AT = 64
"""Images of a site, and to predict, by which colours and brightness are compared."""
_SIDES = 4.0
"""The factor from which sizes of image files differ from those in training."""
_GREY_LEVELS = 2
"""Channels of a grey image differ by no more than this: lossy files round."""


class ImageStatistics(BaseModel):
    """What a model file says of its training images as a whole, of values in [0, 1].

    Attributes:
        mean, std: over all pixels of all images.
        grey: the share of images whose channels are equal.
        side: the geometric mean of the shorter sides of image files, in pixels; None where there were no files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: FiniteFloat = Field(ge=0, le=1)
    std: FiniteFloat = Field(ge=0, le=1)
    grey: FiniteFloat = Field(ge=0, le=1)
    side: FiniteFloat | None = Field(None, gt=0)


@dataclass(frozen=True)
class ColumnShift:
    """How a column of samples to predict differs from the training data.

    Attributes:
        name: the column.
        rows: number of rows.
        unknown: share of rows with a category that training did not have.
        outside: share of rows outside the mean ± 5 deviations of training.
        missing: share of rows without a value.
        overlap: with the training data as a whole, from 0 to 1; None for categories or too few values.
        details: what to say of it: the unknown categories, or the range.
        expected: whether missing values are expected, since training had some.
    """

    name: str
    rows: int
    unknown: float = 0.0
    outside: float = 0.0
    missing: float = 0.0
    overlap: float | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    expected: bool = True

    @property
    def reasons(self) -> list[str]:
        """What is unusual, in words; empty if nothing is."""
        reasons = []
        if self.unknown > REPORTED:
            reasons.append(f"{_percent(self.unknown)} of the rows have an unknown category ({self.details['unknown']})")
        if self.outside > REPORTED:
            reasons.append(f"{_percent(self.outside)} of the rows are outside {self.details['range']}")
        if self.overlap is not None and self.overlap < OVERLAP_REPORTED:
            reasons.append(f"{self.details['moments']} (overlap {self.overlap:.2g})")
        if self.missing > REPORTED and not self.expected:
            reasons.append(f"{_percent(self.missing)} of the rows have no value, in training all had one")
        elif self.missing == 1 and self.rows >= MANY:
            reasons.append("no row has a value, in training some had")
        return reasons

    @property
    def odd_rows(self) -> float:
        """The share of rows with a value that training had none of."""
        return max(self.unknown, self.outside, 0.0 if self.expected else self.missing)

    @property
    def doubt(self) -> float:
        """The share of rows for which answers may be anything: those with odd values; all of them as the overlap of
        the column comes near the one that is refused, and none as it comes near the one that is not reported."""
        common = 1.0 if self.overlap is None else self.overlap
        apart = (OVERLAP_REPORTED - common) / (OVERLAP_REPORTED - OVERLAP_REFUSED)
        return min(1.0, max(0.0, apart, self.odd_rows if self.odd_rows > REPORTED else 0.0))

    @property
    def is_refused(self) -> bool:
        """Whether it differs so much that predictions would be of little use."""
        share = self.odd_rows
        far = self.overlap is not None and self.overlap < OVERLAP_REFUSED
        return self.rows >= FEWEST and (share > REFUSED or far)


@dataclass(frozen=True)
class InputShift:
    """How samples to predict differ from the training data.

    Attributes:
        columns: every column of which the model file says something.
        images: what is unusual about images, in words.
        refused_images: those of them that make predictions useless.
    """

    columns: tuple[ColumnShift, ...] = ()
    images: tuple[str, ...] = ()
    refused_images: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """What is unusual, in one line; None if nothing is."""
        return self._describe([column for column in self.columns if column.reasons], self.images)

    @property
    def refusal(self) -> str | None:
        """What is too unusual to be predicted, in one line; None if nothing is."""
        return self._describe([column for column in self.columns if column.is_refused], self.refused_images)

    @property
    def doubt(self) -> float:
        """The share of rows for which answers may be anything, by the column of which that is most."""
        return max((column.doubt for column in self.columns), default=0.0)

    def _describe(self, columns: Sequence[ColumnShift], images: Sequence[str]) -> str | None:
        if not columns and not images:
            return None
        named = (f"column '{one_line(column.name)}': {', '.join(column.reasons)}" for column in columns[:_MOST_COLUMNS])
        parts = [*images, *named]
        more = f"; and {len(columns) - _MOST_COLUMNS} more columns" if len(columns) > _MOST_COLUMNS else ""
        return f"the data look unlike those that the model was trained on: {'; '.join(parts)}{more}"

    def check(self, *, accept: bool) -> None:
        """Raise UserError where the data are too unlike the training data, unless that is accepted."""
        if self.refusal is not None and not accept:
            raise UserError(
                f"{self.refusal}. Mend the data, or predict all the same: --accept-shift, in Python accept_shift=True"
            )


def overlap(mean: float, std: float, other: float, deviation: float) -> float:
    """The Bhattacharyya coefficient of two normal distributions, from 0 to 1; 0 if a number is not finite.

    Source: Bhattacharyya, Bulletin of the Calcutta Mathematical Society 1943.

    Args:
        mean, std: of the one.
        other, deviation: of the other.

    Example:
        >>> overlap(0, 1, 0, 1), round(overlap(0, 1, 2, 1), 3), round(overlap(0, 1, 0, 10), 3)
        (1.0, 0.607, 0.445)
    """
    size = math.hypot(std, deviation)
    if not all(map(math.isfinite, (mean, size, other))):
        return 0.0
    if size == 0:
        return float(mean == other)
    apart = min(abs(mean - other) / size, 1e3)  # divided and cut off first: squares of large numbers overflow
    ratio = min(std, deviation) / max(std, deviation)
    return math.sqrt(2 * ratio / (1 + ratio**2)) * math.exp(-(apart**2) / 4)


def table_shift(table: Columns, encoding: TableEncoding, own_scale: bool = False) -> InputShift:
    """How the rows of a table differ from those that an encoding was made of.

    ``own_scale``: whether each site's numbers are in its own scale, so that only how many are missing can differ.

    Raises:
        UserError: the table lacks a column, or a numeric cell is not a number.
    """
    numeric = [
        _of_numbers(
            item.name,
            item.mean,
            item.std,
            item.can_be_missing or item.fill is not None,
            numbers(table, item.name, item.missing_values),
        )
        for item in encoding.numeric
    ]
    if own_scale:
        numeric = [replace(item, outside=0.0, overlap=None) for item in numeric]
    return InputShift(
        (*numeric, *(_of_categories(column, table.column(column.name)) for column in encoding.categorical))
    )


def feature_shift(inputs: npt.NDArray[Any], preprocessing: Preprocessing, names: Sequence[str] = ()) -> InputShift:
    """How features (n, d) differ from those whose means and deviations the preprocessing has, if it has any.

    ``names`` are those of the columns; by default their numbers.
    """
    mean, std = preprocessing.mean, preprocessing.std
    if mean is None or std is None or inputs.ndim != 2 or inputs.shape[1] != len(mean):
        return InputShift()
    return InputShift(
        tuple(
            _of_numbers(
                names[number] if names else str(number),
                mean[number],
                std[number],
                False,
                inputs[:, number].astype(np.float64),
            )
            for number in range(len(mean))
            if std[number] > 0 and math.isfinite(mean[number])
        )
    )


def _of_numbers(name: str, mean: float, std: float, may_miss: bool, values: npt.NDArray[np.float64]) -> ColumnShift:
    """A numeric column with NaN where values are missing; ``mean`` and ``std`` are those of the training data."""
    rows, there = len(values), values[~np.isnan(values)]
    deviations = DEVIATIONS if rows >= ENOUGH else OF_FEW
    low, high = mean - deviations * std, mean + deviations * std
    details = {"range": f"{low:.4g} to {high:.4g} (mean ± {deviations:g} deviations of the training data)"}
    if abs(std**2 - mean * (1 - mean)) <= 1e-9:  # as of a column of 0 and 1, where a rare 1 is far from the mean
        low, high = min(low, 0.0), max(high, 1.0)
    common = None
    if len(there) >= ENOUGH:
        with np.errstate(over="ignore", invalid="ignore"):
            new_mean, deviation = float(there.mean()), float(there.std())
        details["moments"] = f"{new_mean:.4g} ± {deviation:.3g}, in training {mean:.4g} ± {std:.3g}"
        # Where most values are one, such as 0, the deviation says how many are not, and nothing of units.
        spread = len(there) >= MANY and np.mean(there == np.median(there)) <= 0.5
        common = overlap(mean, std, new_mean, deviation if spread else max(deviation, std))
    return ColumnShift(
        name,
        rows,
        outside=float(np.count_nonzero((there < low) | (there > high))) / rows if rows else 0.0,
        missing=1 - len(there) / rows if rows else 0.0,
        overlap=common,
        details=details,
        expected=may_miss,
    )


def _of_categories(column: CategoricalColumn, cells: Sequence[str]) -> ColumnShift:
    there = [canonical(cell) for cell in cells if not is_missing(cell)]
    known = set(column.categories)
    unknown = [cell for cell in there if cell not in known]
    details = {"unknown": f"{_listing(sorted(set(unknown)))}; known: {_listing(column.categories)}"}
    rows = len(cells)
    return ColumnShift(
        column.name,
        rows,
        unknown=len(unknown) / rows if rows else 0.0,
        missing=1 - len(there) / rows if rows else 0.0,
        details=details,
    )


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_COLUMNS} more" if len(names) > _MOST_COLUMNS else ""
    return ", ".join(f"'{one_line(name, 60)}'" for name in names[:_MOST_COLUMNS]) + more


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


# Images ---------------------------------------------------------------------------------------------------------------


def image_statistics(sites: Iterable[npt.NDArray[Any]], sides: Sequence[int] = ()) -> ImageStatistics | None:
    """What a model file says of its training images; None of so few that single ones would show.

    Args:
        sites: of each site, uint8 images (n, c, h, w).
        sides: the shorter sides of some image files.
    """
    looked_at = [_some(images) for images in sites]
    number = sum(map(len, looked_at))
    if number < ENOUGH:
        return None
    counts = sum(np.bincount(images.ravel(), minlength=256) for images in looked_at)
    mean, std = _brightness(np.asarray(counts))
    grey = sum(int(_is_grey(images).sum()) for images in looked_at)
    side = _geometric_mean(sides) if len(sides) >= ENOUGH else None
    return ImageStatistics(mean=mean, std=std, grey=grey / number, side=side)


def _geometric_mean(sides: Sequence[int]) -> float:
    return float(np.exp(np.log(np.maximum(1, sides)).mean()))


def image_shift(
    images: npt.NDArray[np.uint8], trained: ImageStatistics | None, sides: Sequence[int] = ()
) -> InputShift:
    """How images (n, c, h, w) differ from those that a model was trained on; ``sides``: the shorter ones of files."""
    if len(images) == 0:
        return InputShift()
    if int(images.max()) <= _MOST_PIXELS and (trained is None or trained.mean > 2 / 255):
        if int(images.max()) == 0:
            return InputShift(images=("every pixel is black",))
        dark = "no pixel is above 1 of 255: multiply images with values from 0 to 1 by 255"
        return InputShift(images=(dark,), refused_images=(dark,) if len(images) >= FEWEST else ())
    if trained is None:
        return InputShift()
    some, result, refused = _some(images), [], []
    mean, std = _brightness(np.bincount(some.ravel(), minlength=256))
    common = overlap(trained.mean, trained.std, mean, std)
    if len(some) >= FEWEST and common < OVERLAP_REPORTED:
        result.append(
            f"pixels are {255 * mean:.0f} ± {255 * std:.0f}, in training {255 * trained.mean:.0f} ± "
            f"{255 * trained.std:.0f} (overlap {common:.2g})"
        )
    grey = float(_is_grey(some).mean())
    if images.shape[1] == 3 and grey - trained.grey > REPORTED:
        text = f"{_percent(grey)} of the images are grey, in training {_percent(trained.grey)}"
        result.append(text)
        refused += [text] if grey - trained.grey > REFUSED and len(some) >= FEWEST else []
    if trained.side is not None and sides:
        side = _geometric_mean(sides)
        if max(side / trained.side, trained.side / side) > _SIDES:
            result.append(
                f"image files have about {side:.0f} pixels on their shorter side, in training {trained.side:.0f}"
            )
    return InputShift(images=tuple(result), refused_images=tuple(refused))


def _some(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.asarray(images[:: max(1, math.ceil(len(images) / LOOKED_AT))])


def _brightness(counts: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Mean and deviation of pixels in [0, 1], from how many have each of 256 values."""
    level = np.arange(256) / 255
    whole = counts.sum()
    mean = float((counts * level).sum() / whole)
    return mean, float(np.sqrt(max(0.0, (counts * level**2).sum() / whole - mean**2)))


def _is_grey(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Whether all channels of each image are equal; True for images of one channel."""
    first = images[:, :1].astype(np.int16)
    apart = np.abs(images.astype(np.int16) - first)
    return np.asarray(apart.reshape(len(images), -1).max(axis=1) <= _GREY_LEVELS)
