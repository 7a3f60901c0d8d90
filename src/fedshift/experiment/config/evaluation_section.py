"""The section ``evaluation`` of an experiment file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedshift.evaluation.records import SiteMetric
from fedshift.experiment.section import Section


class Evaluation(Section):
    """What is measured with the model of a run's last round, and what is kept of it."""

    headline: SiteMetric = Field(
        "accuracy", description="the measure of the first table and of the page; accuracy: that of the task"
    )
    predictions: bool = Field(
        True, description="keep the scores of every measured sample in each run's predictions.parquet"
    )
    resamples: Annotated[int, Field(ge=0, le=100_000)] = Field(
        1000, description="bootstrap samples of the intervals over samples; large sites use fewer; 0: no intervals"
    )
