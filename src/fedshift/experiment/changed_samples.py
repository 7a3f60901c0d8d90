"""What a model that never saw a site says of its samples when they are changed: cases that teach an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import DataSet, SparseRows
from fedshift.evaluation.estimate.changes import Scores, Usual, changes, nearby_answers
from fedshift.evaluation.estimate.combination import Answers, LeftOut
from fedshift.evaluation.estimate.distances import Samples
from fedshift.evaluation.estimate.input_sums import Moments
from fedshift.experiment.predict import TrainedModel

MOST = 300
"""Samples of a site that are looked at."""
_SAME = 1e-3
"""Scores that differ by less are of the same samples."""
LARGEST = 64
"""The longest side of images that are changed, in pixels."""


def looked_at(trained: TrainedModel, data: DataSet, site: str, rows: NDArray[np.int64], known: LeftOut) -> LeftOut:
    """The same site with what a model says of some of its samples, as they are and under each change.

    Args:
        trained: the model that left the site out.
        rows: each sample's row at its site (n,).
        known: the model's scores of these, and labels.

    Returns:
        ``known`` itself if the samples cannot be changed, see `changeable`, or are not those that were scored.
    """
    if site not in data.domains or (len(rows) and rows.max() >= len(data.domains[site])):
        return known
    some = spread(len(rows))
    inputs, labels, scores = samples_of(data, site, rows[some]), known.labels[some], known.scores[some]
    if not changeable(inputs) or not np.allclose(trained.scores(inputs), scores, atol=_SAME):
        return known
    others = [name for name in data.domains if name != site and name not in data.unlabelled]
    usual, there = usual_values(data, others), samples_at(data, others)
    answers = answers_under_changes(trained.scores, inputs, scores, labels, usual, there)
    return replace(known, looked_at=answers, apart=answers[0].apart)


def answers_under_changes(
    model: Scores,
    inputs: NDArray[Any],
    scores: NDArray[Any],
    labels: NDArray[np.int64],
    usual: Usual,
    there: Samples | Moments,
) -> tuple[Answers, ...]:
    """What a model says of samples as they are, first, and under each change.

    ``labels``: class numbers (n,); ``usual``: what is usual at the sites that trained.
    """
    answers = [Answers(scores, labels, nearby_answers(model, inputs, usual), there.apart(inputs))]
    for number, (_, changed) in enumerate(changes(inputs, usual), 1):
        nearby = nearby_answers(model, changed, usual, number)
        answers.append(Answers(model(changed).astype(np.float64), labels, nearby, there.apart(changed)))
    return tuple(answers)


def usual_values(data: DataSet, sites: Sequence[str]) -> Usual:
    """What is usual at some sites of the data, from at most `MOST` samples of each."""
    return Usual.of([samples_of(data, site, spread(len(data.domains[site]))) for site in sites])


def samples_at(data: DataSet, sites: Sequence[str]) -> Samples:
    """Samples of some sites to compare with, at most `MOST` of each."""
    return Samples.of([samples_of(data, site, spread(len(data.domains[site]))) for site in sites])


def spread(samples: int) -> NDArray[np.int64]:
    """At most `MOST` rows of so many samples, drawn once and for all, in order."""
    return np.sort(np.random.default_rng(0).permutation(samples)[:MOST])


def samples_of(data: DataSet, site: str, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Some samples of a site as an array."""
    inputs = data.domains[site].inputs
    return inputs.dense(rows) if isinstance(inputs, SparseRows) else np.asarray(inputs)[rows]


def changeable(inputs: NDArray[Any]) -> bool:
    """Whether samples are vectors of numbers, or images of bytes small enough for some 60 looks at each."""
    if inputs.dtype == np.uint8:
        return inputs.ndim == 4 and max(inputs.shape[2:]) <= LARGEST
    return inputs.ndim == 2 and inputs.dtype.kind == "f"
