"""The fields of a data section that say what is learned, and the agreed scale of a quantity.

Nothing here needs torch; `fedshift.data.tasks.objective` has what networks minimise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat, model_validator

from fedshift.data.domain import Preprocessing
from fedshift.data.site_labels import SiteLabels
from fedshift.errors import UserError, nearest
from fedshift.functional.survival import MeanOver
from fedshift.text import type_in_words

Declared = Literal["classification", "regression", "time_to_event", "multi_label"]
"""The tasks that a data section can name; data with masks are for segmentation by themselves."""
Sums = Mapping[str, float]
"""Count, total and sum of squares of a site's labels."""
_OF_REGRESSION = ("loss", "huber_delta", "label_statistics_from")


class TaskFields(SiteLabels):
    """Base of the data sets whose labels can be other than classes."""

    task: Declared = Field(
        "classification",
        description="what is learned: classes, with regression a quantity, with time_to_event who has an event sooner, "
        "with multi_label which of several labels a sample has",
    )
    loss: Literal["squared", "absolute", "huber"] = Field(
        "squared", description="task regression: what is minimised, of the standardised label"
    )
    huber_delta: PositiveFloat = Field(
        1.0, description="loss huber: from this error on, in standard deviations of the label, the loss is linear"
    )
    mean_over: MeanOver = Field(
        "events", description="task time_to_event: a mini-batch's loss is the mean over its events, or over its samples"
    )
    label_statistics_from: tuple[str, ...] | None = Field(
        None, description="task regression: the sites whose sums scale the label; unset: those of statistics_from"
    )

    @model_validator(mode="after")
    def _options_of_the_task(self) -> Self:
        if self.task != "regression":
            for name in _OF_REGRESSION:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is for a quantity: write task: regression beside it, or leave it out")
        if self.mean_over != "events" and self.task != "time_to_event":
            raise ValueError("mean_over is for times: write task: time_to_event beside it, or leave it out")
        if self.huber_delta != 1.0 and self.loss != "huber":
            raise ValueError("huber_delta needs loss: huber")
        return self

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes."""
        return self.task == "classification"

    @property
    def scales_labels(self) -> bool:
        """Whether sites agree on the scale of the label."""
        return self.task == "regression"

    def objective(self, sums: Sequence[Sums]) -> dict[str, object] | None:
        """What `Preprocessing.objective` holds.

        ``sums``: of the labels of each site that has a say; empty if the scale is not agreed yet. UserError if the
        labels are too large to be squared.
        """
        if self.task == "classification":
            return None
        if not self.scales_labels:
            return {"task": self.task} | ({} if self.mean_over == "events" else {"mean_over": self.mean_over})
        predicted: dict[str, object] = {"task": self.task, "loss": self.loss, "huber_delta": self.huber_delta}
        unscaled = {**predicted, "mean": 0.0, "std": 1.0}
        return with_label_scale(unscaled, sums) if sums else unscaled

    def check_objective(self, preprocessing: Preprocessing) -> None:
        """Check, at a site, that the federation learns the task and loss that its own data section names.

        The scale of the label may differ, since sites agree on it later.

        UserError if they ask for another task or loss.
        """
        local, asked = self.objective([]) or {}, preprocessing.objective or {}
        if any(local.get(name) != asked.get(name) for name in ("task", "loss", "huber_delta", "mean_over")):
            raise UserError("the federation learns another task or loss than the data section of this site says")


def with_label_scale(objective: Mapping[str, object], sums: Sequence[Sums]) -> dict[str, object]:
    """An objective whose label has the mean and deviation that follow from the sums of sites.

    Example:
        >>> sums = [label_sums(np.array([1.0, 1.0])), label_sums(np.array([5.0, 5.0]))]
        >>> with_label_scale({"task": "regression"}, sums)
        {'task': 'regression', 'mean': 3.0, 'std': 2.0}

    Raises:
        UserError: the labels are too large to be squared.
    """
    count, total, squares = (float(sum(item[name] for item in sums)) for name in ("count", "total", "squares"))
    mean = total / count
    variance = squares / count - mean**2
    if not np.isfinite(variance):
        raise UserError("the labels are too large to standardise: give them another unit")
    # Rounding gives a constant label a variance of about 1e-16 of its square instead of 0.
    constant = variance <= 1e-12 * (1 + mean**2)
    return {**objective, "mean": mean, "std": 1.0 if constant else float(np.sqrt(variance))}


def sites_for_statistics(chosen: tuple[str, ...] | None, sites: Mapping[str, object]) -> tuple[str, ...]:
    """The sites whose statistics are used.

    ``chosen``: names of sites; None: all. UserError if no site is chosen, or one does not exist; names the nearest one.
    """
    if chosen is None:
        return tuple(sites)
    if not chosen:
        raise UserError("data.statistics_from: no site is left; name a source, or leave the field out")
    for site in chosen:
        if site not in sites:
            raise UserError(f"data.statistics_from: no site '{site}'; {nearest(site, sites)}")
    return chosen


def label_sums(labels: npt.NDArray[Any]) -> dict[str, float]:
    """What one site gives of its labels (n,): how many, their sum and their sum of squares.

    Example:
        >>> label_sums(np.array([1.0, 3.0]))
        {'count': 2, 'total': 4.0, 'squares': 10.0}
    """
    values = labels.astype(np.float64)
    with np.errstate(over="ignore"):
        return {"count": len(values), "total": float(values.sum()), "squares": float((values**2).sum())}


def _describe(values: npt.NDArray[Any]) -> str:
    """What labels are that cannot be read."""
    return f"y is {type_in_words(values.dtype)} of shape {values.shape}"


def quantities(where: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Labels of a regression, checked.

    Returns float32 (n,). UserError if they are not one finite number for each sample.
    """
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise UserError(f"{where}: {_describe(values)}; task regression needs one number each")
    with np.errstate(over="ignore"):
        labels = values.astype(np.float32)
    if not np.isfinite(labels).all():
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise UserError(f"{where}: y holds NaN or infinite values (first: row {row}): fill or drop such rows")
    return labels


def times(where: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Labels of time to event, checked.

    Returns float32 (n, 2): times, and events as 0 or 1. UserError if they are not a time that is not negative and a 0
    or 1 for each sample.
    """
    if values.ndim != 2 or values.shape[1] != 2 or values.dtype.kind not in "iufb":
        raise UserError(
            f"{where}: {_describe(values)}; task time_to_event needs (n, 2): the time, and 1 "
            "where the event happened, else 0"
        )
    with np.errstate(over="ignore"):
        labels = values.astype(np.float32)
    bad = ~np.isfinite(labels[:, 0]) | (labels[:, 0] < 0) | ~np.isin(labels[:, 1], (0, 1))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise UserError(
            f"{where}: row {row} of y needs a time of 0 or more and an event of 0 or 1: mend or drop the row"
        )
    return labels


def flags(where: str, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Labels of multi-label classification, checked.

    Returns float32 (n, labels) of 0 and 1. A single label may be (n,): it is a network of one logit. UserError if they
    are no columns of 0 and 1.
    """
    if values.ndim not in (1, 2) or values.dtype.kind not in "iufb":
        raise UserError(f"{where}: {_describe(values)}; task multi_label needs (n, labels) or (n,) of 0 and 1")
    values = values.reshape(len(values), -1)
    wrong = ~np.isin(values, (0, 1)).all(axis=1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UserError(f"{where}: row {row} of y holds another number than the 0 and 1 of task multi_label: mend it")
    return values.astype(np.float32)
