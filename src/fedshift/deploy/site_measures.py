"""What a site reports of a model that it measured on its own samples: numbers that reveal no small group of samples."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedshift.data.site_data import SiteData
from fedshift.data.tasks.objective import Objective
from fedshift.deploy.remote.policy import ACCURACY, METRICS, Policy
from fedshift.errors import FedshiftError, Refused
from fedshift.evaluation.metrics import counts_by_class
from fedshift.evaluation.records import Part
from fedshift.evaluation.tasks.measuring import MetricOptions, measuring_of
from fedshift.experiment.runs.evaluator import predictions, scored
from fedshift.models.network import Network


class Whole(BaseModel):
    """How a coordinator asks for all metrics, at the end of a run.

    Attributes:
        part: what the site is in the run: the target, or a source, of which the held-out samples are measured.
        resamples: bootstrap samples of the intervals.
        threshold: the score from which a sample of a target is positive; None if no source chose one.
        sums: whether sums of confidences are asked for, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    part: Part
    resamples: Annotated[int, Field(ge=0, le=100_000)] = 0
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    sums: bool = False


def measured(
    network: Network,
    view: SiteData,
    classes: int,
    objective: Objective,
    policy: Policy,
    groups: NDArray[np.int64] | None,
    asked: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a site reports, and what its audit log says of it.

    Args:
        network: the model.
        view: the measured samples.
        classes: how many classes there are.
        objective: what the run learns.
        policy: the site's policy, which may hold back classes of few samples, and all metrics but the accuracy.
        groups: which of the samples belong together; None if all are apart.
        asked: the coordinator's request for all metrics, as it came; None after rounds before the last.

    Raises:
        FedshiftError: the request cannot be read.
    """
    sent = {"measures": {"kind": ACCURACY}}
    measuring = measuring_of(objective)
    labels = view.labels.cpu().numpy()
    metrics = None
    if asked is None or METRICS not in policy.send:
        found = predictions(network, view, objective)
    else:
        try:
            whole = Whole.model_validate(asked)
        except ValidationError:
            raise FedshiftError("a request for metrics cannot be read") from None
        scores = scored(network, view, objective, groups)
        found = scores.predicted
        limits = whole.resamples if whole.part == "target" else 0
        options = MetricOptions(whole.threshold, limits, policy.smallest_group)
        metrics = measuring.at_site("", whole.part, scores, options).model_dump(mode="json")
        sent["metrics"] = {"kind": METRICS}
    pairs = counts_by_class(found, labels, classes, policy.smallest_group) if measuring.counts_classes else []
    value = measuring.value(found, labels)
    if value is None or measuring.shows_few(labels, policy.smallest_group):
        # Of tasks without classes there is no part that could be kept back alone.
        raise Refused("too few of the measured samples can be compared (rule policy.smallest_group)")
    measures = {
        "accuracy": value,
        "samples": len(labels),
        "classes": pairs,
        "metrics": metrics,
    }
    return measures, sent
