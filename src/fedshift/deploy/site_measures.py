"""What a site reports of a model that it measured on its own samples: numbers that reveal no small group of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.site_data import SiteData
from fedshift.data.tasks.objective import Objective
from fedshift.deploy.remote.policy import ACCURACY, METRICS, Policy
from fedshift.deploy.remote.replies import Measures
from fedshift.deploy.remote.requests import Whole
from fedshift.errors import Refused
from fedshift.evaluation.measuring import MetricOptions, measuring_of
from fedshift.evaluation.metrics import counts_by_class
from fedshift.experiment.runs.evaluator import predictions, score
from fedshift.models.network import Network


def measure_at_site(
    network: Network,
    view: SiteData,
    classes: int,
    objective: Objective,
    policy: Policy,
    groups: NDArray[np.int64] | None,
    asked: Whole | None,
) -> tuple[Measures, dict[str, Any]]:
    """What a site reports, and what its audit log says of it.

    Args:
        asked: the coordinator's request for all metrics; None after rounds before the last.

    Raises:
        Refused: too few samples can be compared.
    """
    sent = {"measures": {"kind": ACCURACY}}
    measuring = measuring_of(objective)
    labels = view.labels.cpu().numpy()
    metrics = None
    if asked is None or METRICS not in policy.send:
        result = predictions(network, view, objective)
    else:
        scores = score(network, view, objective, groups)
        result = scores.predicted
        limits = asked.resamples if asked.part == "target" else 0
        options = MetricOptions(asked.threshold, limits, policy.smallest_group)
        metrics = measuring.at_site("", asked.part, scores, options)
        sent["metrics"] = {"kind": METRICS}
    pairs = counts_by_class(result, labels, classes, policy.smallest_group) if measuring.counts_classes else []
    value = measuring.value(result, labels)
    if value is None or measuring.shows_few(labels, policy.smallest_group):
        # Of tasks without classes there is no part that could be kept back alone.
        raise Refused("too few of the measured samples can be compared (rule policy.smallest_group)")
    classes_told = tuple(None if pair is None else (pair[0], pair[1]) for pair in pairs)
    return Measures(accuracy=value, samples=len(labels), classes=classes_told, metrics=metrics), sent
