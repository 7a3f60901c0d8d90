"""How far predicted quantities are from the true ones, by scikit-learn, with intervals by the bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.bootstrap import limits_of, resampled_metrics
from fedshift.evaluation.metric_entries import values_of
from fedshift.evaluation.records import Part, SiteMetric, SiteMetrics
from fedshift.evaluation.site_metrics import Scored
from fedshift.evaluation.weighted_samples import Numbers, Quantities
from fedshift.extras import import_extra


def rmse(predicted: NDArray[Any], labels: NDArray[Any]) -> float:
    """The root of the mean squared error, in the label's unit.

    Raises:
        ValueError: the shapes differ, or there is no sample.

    Example:
        >>> rmse(np.array([1.0, 2.0]), np.array([1.0, 4.0])) ** 2
        2.0000000000000004
    """
    metrics = import_extra("sklearn.metrics", extra="report", what="measuring regression")
    return float(metrics.root_mean_squared_error(labels.astype(np.float64), predicted.astype(np.float64)))


def regression_metrics(site: str, part: Part, scored: Scored, mean: float, resamples: int = 0) -> SiteMetrics:
    """RMSE and MAE in the label's unit, R² in percent, and the RMSE of always saying the mean of the sources.

    R² compares with always saying this site's own mean: 100 is perfect, and it may be below 0. A site whose labels are
    all equal has none.

    Args:
        resamples: bootstrap samples of the intervals; 0: no intervals.

    Example:
        >>> labels, said = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])
        >>> found = regression_metrics("a", "target", Scored(labels, said, said[:, None]), mean=2.0)
        >>> {metric: round(value, 2) for metric, value in found.values.items()}, round(found.baseline, 2)
        ({'rmse': 0.58, 'mae': 0.33, 'r2': 50.0}, 0.82)
    """
    metrics = import_extra("sklearn.metrics", extra="report", what="measuring regression")
    labels, predicted = scored.labels.astype(np.float64), scored.predicted.astype(np.float64)
    mae = float(metrics.mean_absolute_error(labels, predicted))
    values: dict[SiteMetric, float] = {"rmse": rmse(predicted, labels), "mae": mae}
    if np.ptp(labels) > 0:
        values["r2"] = 100.0 * float(metrics.r2_score(labels, predicted))
    limits: dict[SiteMetric, tuple[float, float]] = {}
    if resamples:

        def metrics_of_weights(weights: Numbers) -> dict[str, Numbers]:
            with np.errstate(divide="ignore", invalid="ignore"):
                return values_of("rmse", Quantities(labels, predicted, weights), values)

        limits = limits_of(resampled_metrics(metrics_of_weights, len(labels), scored.groups, resamples))
    return SiteMetrics(
        site=site,
        part=part,
        samples=len(labels),
        support=[],
        values=values,
        intervals=limits,
        baseline=rmse(np.full_like(labels, mean), labels),
    )
