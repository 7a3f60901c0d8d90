"""A site's part in estimates of accuracy at sites without labels.

A site with labels that was left out of a run answers with sums of what the run's model says of its samples, and once
with a reading of them, made with the sums of the other sites. A site without labels gets the model, writes its
predictions on its own disk, and estimates by itself. It answers nothing but that it has done so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedshift.data.domain import Preprocessing, SparseRows
from fedshift.data.input_guard import InputShift, feature_shift, image_shift
from fedshift.deploy.remote.policy import CONFIDENCES
from fedshift.deploy.remote.requests import SCORES, Asked, EstimateRequest, ReadingAnswer, ReadingRequest
from fedshift.deploy.remote.transport import Done, answer_of
from fedshift.deploy.remote.wire import Message
from fedshift.deploy.site_file import Holding, SiteConfig
from fedshift.digests import read_object, write_object
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.evaluation.estimate.combination import LEVEL, Estimate, estimate_from_sums, read
from fedshift.evaluation.estimate.plain_sums import (
    MOST_CLASSES,
    GivenReading,
    GivenSums,
    check_classes,
    known_sites,
    plain_reading,
    plain_sums,
)
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.evaluation.predictions import PREDICTIONS, UNLABELLED, SitePredictions, as_parquet
from fedshift.evaluation.site_metrics import Scored
from fedshift.experiment.estimate import noted
from fedshift.experiment.handing_out import ESTIMATE
from fedshift.experiment.runs.run_folder import MODEL, model_file
from fedshift.files import write_bytes
from fedshift.text import json_text, printable
from fedshift.weights import Weights

READING = "-reading.json"
_REMEDY = "delete it, and deploy again for an estimate"


class SiteEstimates:
    """What one site keeps and answers.

    Args:
        config: the site's.
    """

    def __init__(self, config: SiteConfig) -> None:
        self._site, self._policy = config.file.site, config.file.policy
        self._private = config.file.privacy is not None
        self._memory, self._received = config.memory, config.received

    # At a site with labels --------------------------------------------------------------------------------------------

    def check_gives(self) -> None:
        """Raise Refused unless sums of confidences may leave."""
        if self._private:
            raise Refused(
                f"site '{self._site}' has a budget of privacy and sends no confidences, which have no noise (rule "
                "privacy.epsilon)"
            )
        self._policy.check_kind(self._site, CONFIDENCES, "an estimate at a site without labels")

    def sums(self, run: str, scored: Scored, classes: int, threshold: float, entry: dict[str, Any]) -> GivenSums | None:
        """The sums of what a model that never saw this site says of its samples; the scores stay here for `reading`.

        Returns:
            The sums; None where some class has fewer samples than `Policy.smallest_group`, or there are too many.

        Raises:
            Refused: they may not leave.
        """
        self.check_gives()
        self._policy.check_group(self._site, CONFIDENCES, len(scored.labels), "an estimate")
        counts = np.bincount(scored.labels, minlength=classes)
        if classes > MOST_CLASSES or any(0 < count < self._policy.smallest_group for count in counts):
            return None
        keep_scores(self._memory, run, scored.scores)
        entry["sent"]["sums"] = {"kind": CONFIDENCES}
        return GivenSums.model_validate(plain_sums(sums_of(scored.scores, scored.labels, threshold)))

    def reading(self, asked: Asked[ReadingRequest]) -> Message:
        """What estimators say of the kept scores, from the sums of the other sites: once for each run.

        Raises:
            Refused: readings may not leave, or there was another one.
        """
        self.check_gives()
        run, before = asked.request.run, asked_reading(self._memory, asked.request.run)
        if before not in (None, asked.key):
            raise Refused(f"site '{self._site}' gives one reading of its scores in a run, and gave it")
        if (scores := kept_scores(self._memory, run)) is None:
            raise FedshiftError(f"site '{self._site}' has no scores of run {run}")
        others = asked.request.sums
        check_classes(others, scores.shape[1])
        reading = GivenReading.model_validate(plain_reading(read(others.sums, scores)))
        note_reading(self._memory, run, asked.key)
        asked.entry["sent"] = {"reading": {"kind": CONFIDENCES}}
        return answer_of(asked.key, ReadingAnswer(reading=reading))

    def forget(self, run: str) -> None:
        """Remove the scores of a run."""
        for end in (SCORES, READING):
            (self._memory / f"{run}{end}").unlink(missing_ok=True)

    # At a site without labels -----------------------------------------------------------------------------------------

    def receive(
        self, run: str, weights: Weights, told: Sequence[SitePredictions], holding: Holding, metadata: Mapping[str, Any]
    ) -> None:
        """Write the model of a run, and what it says of the samples here; ``metadata``: what model it is."""
        about = {**metadata, "classes": list(holding.data.classes)}
        write_bytes(self._received / run / MODEL, model_file(weights, about), private=True)
        write_bytes(self._received / run / PREDICTIONS, as_parquet(told, about["classes"], about), private=True)

    def estimate(self, asked: Asked[EstimateRequest], holding: Holding) -> Message:
        """Estimate the accuracy of a run's model here, from what left-out sites tell, and keep it.

        Raises:
            FedshiftError: there are no predictions of the run, or it is of other classes or columns.
        """
        run, classes = asked.request.run, holding.data.classes
        answers = [one for one in noted(self._received / run, classes) if one.part == UNLABELLED]
        if not answers:
            raise FedshiftError(f"site '{self._site}' has no predictions of run {run}")
        known = known_sites(asked.request.known, len(classes))
        shift = _shift(holding, answers[0].rows, asked.request.preprocessing)
        threshold = threshold_of(asked.request.threshold)
        estimate = estimate_from_sums(
            known, answers[0].known.scores, unlike=shift.refusal, unusual=shift.warning, threshold=threshold
        )
        write_bytes(
            self._received / run / ESTIMATE, f"{json_text(estimate.plain(), indent=2)}\n".encode(), private=True
        )
        print(printable(f"{run}: {in_words(estimate)} ({self._received / run})"), flush=True)
        return answer_of(asked.key, Done())


def threshold_of(threshold: float | None) -> float:
    """The threshold of a run in a request: 0.5 where its sources chose none.

    Raises:
        FedshiftError: it is none.
    """
    if threshold is None:
        return 0.5
    if not 0 < threshold < 1:
        raise FedshiftError("a threshold is between 0 and 1")
    return threshold


def keep_scores(memory: Path, run: str, scores: NDArray[Any]) -> None:
    """Keep the scores of a run's last model beside the memory of the run. No reading was made of them."""
    write_private(memory / f"{run}{SCORES}", save({"scores": _tensor(scores)}))
    (memory / f"{run}{READING}").unlink(missing_ok=True)


def kept_scores(memory: Path, run: str) -> NDArray[np.float32] | None:
    """The scores that were kept; None if there are none.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found: NDArray[np.float32] = load(read_private(memory / f"{run}{SCORES}", _REMEDY))["scores"].numpy()
    except (OSError, KeyError, SafetensorError):
        return None
    return found


def note_reading(memory: Path, run: str, key: str) -> None:
    """Note the key of the one request for a reading."""
    write_object(memory / f"{run}{READING}", {"key": key}, private=True)


def asked_reading(memory: Path, run: str) -> str | None:
    """The key that was noted; None if there is none.

    Raises:
        Damaged: the file is.
    """
    found = read_object(memory / f"{run}{READING}", _REMEDY, older=True)
    return None if not found else str(found["key"])


def in_words(estimate: Estimate) -> str:
    """An estimate in a line."""
    if estimate.estimate is None:
        return f"no estimate of its accuracy here: {estimate.reasons[0]}"
    warning = "; it may do much worse here: have some samples labelled" if estimate.harmful else ""
    ends = f"{estimate.low:.1f} to {estimate.high:.1f} in {LEVEL:.0%} of cases"
    return f"accuracy here, estimated: {estimate.estimate:.1f} % ({ends}){warning}"


def _shift(holding: Holding, rows: NDArray[np.int64], trained: Preprocessing) -> InputShift:
    """How the samples without a label differ from those that trained, as far as an encoding of these tells.

    Raises:
        FedshiftError: the encoding is of another table.
    """
    inputs = holding.domain.inputs
    try:
        if trained.kind == "table":
            return holding.source.table_shift(preprocessing=trained) or InputShift()
    except (ValueError, UserError):
        raise FedshiftError("a request to estimate has no encoding that can be read") from None
    if isinstance(inputs, SparseRows):
        return InputShift()
    inputs = inputs[rows]
    images = inputs.dtype == np.uint8
    return image_shift(inputs.astype(np.uint8, copy=False), None) if images else feature_shift(inputs, trained)


def _tensor(scores: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(scores))
