"""A site's part in what estimates read of inputs: sums of its own, and comparisons with those of others.

A labelled site gives of each input value the sum and the sum of squares. A site that is left out, and one without
labels, change their own samples and compare them with the sums of the others, so no sample leaves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import Domain, Preprocessing, Rows, SparseRows
from fedshift.deploy.kept_scores import KeptScores
from fedshift.deploy.remote.policy import MOMENTS
from fedshift.deploy.remote.requests import Asked, InputsAnswer, InputsRequest
from fedshift.deploy.remote.transport import answer_of
from fedshift.deploy.remote.wire import Message
from fedshift.deploy.site_file import Holding, SiteConfig
from fedshift.errors import FedshiftError, KindRefused, Refused, UserError
from fedshift.evaluation.estimate.changes import Scores, nearby_answers
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.input_sums import MOST_VALUES, Moments
from fedshift.evaluation.estimate.plain_sums import GivenInputs, plain_inputs
from fedshift.evaluation.estimate.pooled import distance_part, moments_part
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.experiment.changed_samples import answers_under_changes, changeable, spread
from fedshift.experiment.predict import load_model

BY_SUMS = "it read sums of the left-out sites' inputs: a harmful shift is noticed a little less often than by samples"
WARNED_BY_SUMS = "its warning reads sums over the left-out sites' inputs, too"
_SAME = 1e-3


class SiteInputs:
    """What one labelled site gives of its inputs."""

    def __init__(self, config: SiteConfig) -> None:
        self._site, self._policy, self._budget = config.file.site, config.file.policy, config.file.privacy

    def give(self, asked: Asked[InputsRequest], holding: Holding) -> Message:
        """Sums of the inputs of some samples here, in the encoding that is asked for. Refused if they may not leave;
        FedshiftError if they cannot be made of these samples, or the encoding is of another table."""
        self._check()
        if self._policy.secure == "required":
            raise KindRefused(f"site '{self._site}' sends no sums of its inputs alone (rule policy.secure: required)")
        moments = self._moments(self._samples(holding, asked.request.preprocessing))
        try:
            inputs = GivenInputs.model_validate(plain_inputs(moments))
        except ValueError:
            raise FedshiftError(f"site '{self._site}' has values that are too large for sums of them") from None
        asked.entry["sent"] = {"inputs": {"kind": MOMENTS}}
        return answer_of(asked.key, InputsAnswer(inputs=inputs))

    def part(self, holding: Holding, preprocessing: Preprocessing | None, whole: GivenInputs | None) -> Numbers:
        """This site's part of a masked sum, not masked yet: of inputs, or of distances to those of the others.

        Args:
            holding: has the samples.
            preprocessing: their encoding.
            whole: the sum of inputs, once it is known.

        Raises:
            Refused: they may not leave, or this site's inputs are not in the sum.
            FedshiftError: they cannot be made of these samples.
        """
        self._check()
        if preprocessing is None:
            raise FedshiftError("a request to mask lacks an encoding of inputs")
        samples = self._samples(holding, preprocessing)
        mine = self._moments(samples)
        if whole is None:
            return moments_part(mine)
        if not _fit(whole, samples) or whole.samples <= mine.samples:
            raise Refused(f"site '{self._site}' is not in the sum of inputs that it is told")
        others = Moments(
            whole.samples - mine.samples, whole.moments.total - mine.total, whole.moments.squares - mine.squares
        )
        return distance_part(others.apart(samples))

    def _samples(self, holding: Holding, preprocessing: Preprocessing) -> NDArray[Any]:
        rows = spread(len(holding.domain))
        self._policy.check_group(self._site, MOMENTS, len(rows), "an estimate")
        samples = _in_encoding(holding, preprocessing, rows)
        if samples is None:
            raise FedshiftError(f"site '{self._site}' has samples of which no sums are made")
        return samples

    def _moments(self, samples: NDArray[Any]) -> Moments:
        return Moments.of(samples, self._policy.smallest_group)

    def _check(self) -> None:
        """Raise Refused unless sums of inputs may leave."""
        self._policy.check_kind(self._site, MOMENTS, "an estimate at a site without labels")
        if self._budget is not None:
            raise Refused(
                f"site '{self._site}' has a budget of privacy and sends no sums of its inputs, since no noise covers "
                "them (rule privacy.epsilon)"
            )

    def look(self, case: KeptScores, model: Scores, domain: Domain, rows: Rows, there: GivenInputs) -> KeptScores:
        """The same scores, with what the model says of some of the samples under changes.

        Returns ``case`` itself if sums of inputs may not leave here, or the samples cannot be changed or compared.
        ``there``: sums of the inputs of the sites that trained.
        """
        if MOMENTS not in self._policy.send or self._budget is not None:
            return case
        some = spread(len(rows))
        samples, scores, labels = _as_array(domain, rows[some]), case.scores[some], case.labels[some]
        if domain.scale is not None or samples is None or not _fit(there, samples):
            return case
        if not np.allclose(model(samples), scores, atol=_SAME):  # of a frozen network, or one that adapts
            return case
        moments = there.moments
        usual = moments.usual(samples.shape[1:])
        answers = answers_under_changes(model, samples, scores, labels, usual, moments)
        if not all(np.isfinite(item.scores).all() and np.isfinite(item.nearby).all() for item in answers):
            return case
        return replace(case, looked_at=answers)


def compare_inputs(model: Path, inputs: GivenInputs | None, holding: Holding, rows: Rows) -> dict[str, Any]:
    """What a model says near samples here, and how far these are from sums of others' inputs. Returns arguments of
    `estimate_from_sums`; none where nothing can be compared."""
    if inputs is None:
        return {}
    trained = load_model(model)
    samples = _in_encoding(holding, trained.preprocessing, rows)
    if samples is None or not _fit(inputs, samples):
        return {}
    moments = inputs.moments
    nearby = nearby_answers(trained.scores, samples, moments.usual(samples.shape[1:]))
    return {"nearby": nearby, "apart": moments.apart(samples)} if np.isfinite(nearby).all() else {}


def distance_here(
    holding: Holding, rows: Rows, preprocessing: Preprocessing, inputs: GivenInputs | None
) -> Apart | None:
    """How far samples here are from sums of others' inputs; None where they cannot be compared.

    Args:
        holding: has the samples.
        rows: of them.
        preprocessing: the encoding of the sums.
        inputs: the sums; None: they are not known.
    """
    samples = None if inputs is None else _in_encoding(holding, preprocessing, rows)
    if inputs is None or samples is None or not _fit(inputs, samples):
        return None
    return inputs.moments.apart(samples)


def copied_here(holding: Holding, rows: Rows) -> float:
    """The probability that two samples here are copies, see `share_of_copies`."""
    inputs = holding.domain.inputs
    return share_of_copies(inputs.dense(rows) if isinstance(inputs, SparseRows) else np.asarray(inputs[rows]))


def _fit(inputs: GivenInputs, samples: NDArray[Any]) -> bool:
    """Whether sums are of such samples."""
    return len(inputs.total) == math.prod(samples.shape[1:])


def _as_array(domain: Domain, rows: Rows) -> NDArray[Any] | None:
    """Some samples as an array; None if they cannot be changed, see `changeable`, or have too many values."""
    if math.prod(domain.inputs.shape[1:]) > MOST_VALUES:
        return None
    inputs = domain.inputs.dense(rows) if isinstance(domain.inputs, SparseRows) else np.asarray(domain.inputs[rows])
    return inputs if changeable(inputs) else None


def _in_encoding(holding: Holding, preprocessing: Preprocessing, rows: Rows) -> NDArray[Any] | None:
    """Some samples in an encoding of all sites, as `_as_array`."""
    shape = tuple(holding.domain.inputs.shape[1:])
    if holding.given is not None and preprocessing.shape is not None:
        shape = preprocessing.shape
    try:
        return _as_array(holding.encode(preprocessing, shape), rows)
    except (ValueError, KeyError, UserError):
        raise FedshiftError("a request has no encoding that can be read") from None
