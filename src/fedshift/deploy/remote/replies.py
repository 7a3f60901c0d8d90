"""Checks of what only a message from another machine holds: a reply's header, and a site's report of a measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from fedshift.data.domain import Preprocessing
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.remote.policy import ACCURACY, CONFIDENCES
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.plain_sums import GivenSums, checked_sums
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import SiteMetrics
from fedshift.evaluation.site_metrics import BINS
from fedshift.evaluation.tasks.measuring import Measuring, measuring_of
from fedshift.federation.messages import Statistics
from fedshift.federation.replies import fits
from fedshift.weights import Weights

_LONGEST_FILE = 255
"""Characters in the name of a file."""


def checked_header(header: Mapping[str, Any], left: int, remembers: Collection[str]) -> tuple[int, dict[str, str]]:
    """Check the header of a reply to a call.

    Args:
        header: the header.
        left: mini-batches that the site had left.
        remembers: the entries of its memory that the method declares.

    Returns:
        The mini-batches that the site trained on, and the files of its memory by entry.

    Raises:
        FedshiftError: one of them is missing or impossible.
    """
    mini_batches, memory = header.get("mini_batches"), header.get("memory")
    if not isinstance(mini_batches, int) or isinstance(mini_batches, bool) or mini_batches < 0:
        raise FedshiftError("it does not say how many mini-batches it trained on")
    if mini_batches > left:  # absent sites are charged by this number, too: see `Federation.forfeit`
        raise FedshiftError(f"it claims more mini-batches than the {left} that it had left")
    if not isinstance(memory, dict) or len(memory) > len(remembers) + 1:  # and the residuals of rounding
        raise FedshiftError("it does not say what the site remembers")
    if not all(isinstance(item, str) and len(item) <= _LONGEST_FILE for pair in memory.items() for item in pair):
        raise FedshiftError("it does not say in which files the site remembers")
    return mini_batches, memory


class Measured(Statistics):
    """Stands in the ledger for a model that was sent to be measured, and for the site's report of it."""

    kind = ACCURACY


class Confidences(Statistics):
    """Stands in the ledger for a site's sums of confidences."""

    kind = CONFIDENCES


def sums_bytes(sums: GivenSums) -> Confidences:
    """The numbers in a site's sums of confidences, for the ledger."""
    numbers = 2 + 2 * len(sums.by_confidence[0]) + 2 * len(sums.losses) + sums.sums.answers.size
    numbers += 0 if sums.by_score is None else 2 * len(sums.by_score[0])
    return Confidences({"bytes": torch.empty(8 * numbers, dtype=torch.uint8, device="meta")})


def measured_bytes(size: int) -> Measured:
    """Content of ``size`` bytes for the ledger; it takes no memory."""
    return Measured({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def handed_bytes(size: int) -> Weights:
    """A model of ``size`` bytes that a site keeps, for the ledger."""
    return Weights({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def report_bytes(report: Mapping[str, Any]) -> Measured:
    """The numbers in a site's report of a measurement, for the ledger."""
    numbers = 2 + 2 * len(report["classes"])
    metrics = report["metrics"]
    if metrics is not None:
        numbers += (
            len(metrics.support) + len(metrics.values) + 2 * len(metrics.intervals) + 3 * len(metrics.reliability)
        )
    return measured_bytes(8 * numbers)


def checked_measures(value: Any, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Check a site's report of a measurement.

    Args:
        value: what the site sent.
        recipe: the run's setting, of which the classes and the task count.

    Returns:
        ``{accuracy, samples, classes, metrics, sums}``; ``classes`` holds (right, of) per class, or None where it is
        kept back; ``metrics`` is a `SiteMetrics`, and ``sums`` a `GivenSums`, or None where the site does not send it.

    Raises:
        FedshiftError: it is something else, or its numbers are impossible.
    """
    try:
        said, samples, pairs = value["accuracy"], value["samples"], value["classes"]
        pairs = [None if pair is None else (pair[0], pair[1]) for pair in pairs]
    except (TypeError, KeyError, IndexError) as error:
        raise FedshiftError("its measurement cannot be read") from error
    counts = [samples, *(number for pair in pairs if pair for number in pair)]
    if not (fits(said, float) and all(fits(count, int) for count in counts)):
        raise FedshiftError("its measurement cannot be read")
    measuring = measuring_of(objective_of(Preprocessing.model_validate(recipe["preprocessing"])))
    most = ENTRIES[measuring.metric].high or math.inf
    if not (0 <= said <= most and samples >= 1 and all(0 <= pair[0] <= pair[1] <= samples for pair in pairs if pair)):
        raise FedshiftError("its measurement is not an accuracy")
    counted = int(recipe["classes"]) if measuring.counts_classes else 0
    if len(pairs) != counted:
        raise FedshiftError(f"it measured {len(pairs)} classes, the experiment has {counted}")
    metrics = _checked_metrics(value.get("metrics"), samples, int(recipe["classes"]), measuring)
    if metrics is not None and not set(measuring.metrics).issuperset((*metrics.values, *metrics.intervals)):
        raise FedshiftError("its metrics are of another task")
    sums = None if value.get("sums") is None else checked_sums(value["sums"], int(recipe["classes"]))
    if sums is not None and sums.samples != samples:
        raise FedshiftError("its sums of confidences are of another number of samples than it measured")
    return {"accuracy": float(said), "samples": samples, "classes": pairs, "metrics": metrics, "sums": sums}


def _checked_metrics(value: Any, samples: int, classes: int, measuring: Measuring) -> SiteMetrics | None:
    if value is None:
        return None
    try:
        found = SiteMetrics.model_validate_json(json.dumps(value))
    except (ValidationError, ValueError, TypeError, RecursionError):
        raise FedshiftError("its metrics cannot be read or are impossible") from None
    counts = [count for count in found.support if count is not None]
    of_bins = [count for *_, count in found.reliability]
    if len(found.support) != (classes if measuring.tells_support else 0) or len(of_bins) > BINS:
        raise FedshiftError("its metrics are of another number of classes or bins than they were asked for")
    if (
        found.samples != samples
        or (sum(counts) if measuring.counts_classes else max(counts, default=0)) > samples
        or sum(of_bins) > samples
        or (found.events or 0) > samples
    ):
        raise FedshiftError("its metrics are of another number of samples than it measured")
    if any(low > high for low, high in found.intervals.values()):
        raise FedshiftError("its metrics have an interval whose lower end is above the upper one")
    return found
