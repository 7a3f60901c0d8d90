"""A site's part in estimates of accuracy at sites without labels.

A site with labels that was left out of a run answers with sums of what the run's model says of its samples, and once
with a reading of them, made with the sums of the other sites. A site without labels gets the model, writes its
predictions on its own disk, and estimates by itself. It answers nothing but that it has done so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import Preprocessing, SparseRows
from fedshift.data.input_guard import InputShift, feature_shift, image_shift
from fedshift.deploy.kept_scores import READING, KeptScores, asked_reading, keep_scores, kept_scores, note_reading
from fedshift.deploy.remote.policy import CONFIDENCES, MASKED
from fedshift.deploy.remote.requests import SCORES, Asked, EstimateRequest, ReadingAnswer, ReadingRequest
from fedshift.deploy.remote.transport import Done, answer_of
from fedshift.deploy.remote.wire import Message
from fedshift.deploy.site_file import Holding, SiteConfig
from fedshift.deploy.site_inputs import BY_SUMS, WARNED_BY_SUMS, compare_inputs, copied_here, distance_here
from fedshift.errors import FedshiftError, KindRefused, Refused, UserError
from fedshift.evaluation.estimate.combination import (
    LEVEL,
    NOT_LOOKED_AT,
    Estimate,
    estimate_from_sums,
    looks,
    read,
)
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.plain_sums import (
    MOST_CLASSES,
    GivenLooks,
    GivenReading,
    GivenSums,
    check_classes,
    known_sites,
    plain_looks,
    plain_reading,
    plain_sums,
)
from fedshift.evaluation.estimate.pooled import estimate_from_pooled
from fedshift.evaluation.predictions import PREDICTIONS, UNLABELLED, SitePredictions, as_parquet
from fedshift.experiment.estimate import noted_sites
from fedshift.experiment.handing_out import ESTIMATE
from fedshift.experiment.runs.run_folder import MODEL, model_file
from fedshift.files import write_bytes
from fedshift.text import json_text, printable
from fedshift.weights import Weights


class SiteEstimates:
    """What one site keeps and answers.

    Args:
        config: the site's.
    """

    def __init__(self, config: SiteConfig) -> None:
        self._site, self._policy = config.file.site, config.file.policy
        self._budget = config.file.privacy
        self._memory, self._received = config.memory, config.received

    # At a site with labels --------------------------------------------------------------------------------------------

    @property
    def noisy(self) -> bool:
        """Whether what leaves has noise of this site's own."""
        return self._budget is not None

    def check_gives(self, *, masked: bool) -> None:
        """Raise Refused unless sums of confidences may leave, ``masked`` or as they are."""
        if self._budget is not None and self._budget.confidences_noise is None:
            raise Refused(
                f"site '{self._site}' has a budget of privacy and sends no confidences without noise (rule "
                "privacy.confidences_noise)"
            )
        what = "an estimate at a site without labels"
        self._policy.check_kind(self._site, CONFIDENCES, what)
        if masked:
            self._policy.check_kind(self._site, MASKED, what)
        elif self._policy.secure == "required":
            raise KindRefused(
                f"site '{self._site}' sends confidences only masked, as a part of a sum (rule policy.secure: "
                "required); write engine.aggregation: secure"
            )

    def sums(
        self, run: str, kept: KeptScores, classes: int, entry: dict[str, Any], *, masked: bool = False
    ) -> GivenSums | None:
        """The sums of what a model that never saw this site says of its samples; the scores stay here for `reading`.

        Args:
            run: its name.
            kept: the scores; of a site with a budget those that noise allows.
            classes: how many there are.
            entry: of the audit log.
            masked: whether a sum over sites is asked for later; then none leaves now.

        Returns:
            The sums; None where some class has fewer samples than `Policy.smallest_group`, or there are too many.

        Raises:
            Refused: they may not leave.
        """
        self.check_gives(masked=masked)
        self._policy.check_group(self._site, CONFIDENCES, len(kept.labels), "an estimate")
        counts = np.bincount(kept.labels, minlength=classes)
        few = not self.noisy and any(0 < count < self._policy.smallest_group for count in counts)
        if classes > MOST_CLASSES or few:
            return None
        keep_scores(self._memory, run, kept)
        if masked:
            return None
        entry["sent"]["sums"] = {"kind": CONFIDENCES}
        return GivenSums.model_validate(plain_sums(kept.sums))

    def kept_for(self, run: str, by: str, keys: str | None) -> KeptScores:
        """The kept scores of a run, for the one reading or sum that they are in.

        Args:
            run: its name.
            by: which reading or sum.
            keys: of the sites of the sum, as it begins; None: it has begun.

        Raises:
            Refused: they were in another one.
            FedshiftError: there are none.
        """
        before = asked_reading(self._memory, run)
        same = before is not None and (before == f"{by} {keys}" if keys is not None else before.startswith(f"{by} "))
        if not same and (before is not None or keys is None):
            raise Refused(f"site '{self._site}' gives one reading of its scores in a run, and gave it")
        if (kept := kept_scores(self._memory, run)) is None:
            raise FedshiftError(f"site '{self._site}' has no scores of run {run}")
        if keys is not None:
            note_reading(self._memory, run, f"{by} {keys}")
        return kept

    def reading(self, asked: Asked[ReadingRequest]) -> Message:
        """What estimators say of the kept scores, from the sums of the other sites: once for each run.

        Raises:
            Refused: readings may not leave, or there was another one.
        """
        self.check_gives(masked=False)
        case = self.kept_for(asked.request.run, "reading", asked.key)
        others, looked = asked.request.sums, None
        check_classes(others, case.scores.shape[1])
        reading = GivenReading.model_validate(plain_reading(read(others.sums, case.scores)))
        asked.entry["sent"] = {"reading": {"kind": CONFIDENCES}}
        if case.looked_at and (apart := case.looked_at[0].apart) is not None:
            cases = list(looks(others.sums, case.left_out, asked.request.number % 2**32))
            looked = GivenLooks.model_validate(plain_looks(cases, apart))
            asked.entry["sent"]["looked"] = {"kind": CONFIDENCES}
        copied = 0.0 if self.noisy else share_of_copies(case.scores)  # noisy scores are those of bands, so often equal
        return answer_of(asked.key, ReadingAnswer(reading=reading, looked=looked, copied=copied))

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
        answers = [item for item in noted_sites(self._received / run, classes) if item.part == UNLABELLED]
        if not answers:
            raise FedshiftError(f"site '{self._site}' has no predictions of run {run}")
        pooled = asked.request.pooled
        known = known_sites(asked.request.known, len(classes))
        if pooled is not None:
            check_classes(pooled.whole.sums, len(classes))
        shift = _shift(holding, answers[0].rows, asked.request.preprocessing)
        threshold = threshold_of(asked.request.threshold)
        known_here: dict[str, Any] = {
            "unlike": shift.refusal,
            "unusual": shift.warning,
            "threshold": threshold,
            "odd_rows": shift.doubt,
            "copied": copied_here(holding, answers[0].rows),
        }
        scores = answers[0].known.scores
        if pooled is None:
            known_here |= compare_inputs(self._received / run / MODEL, asked.request.inputs, holding, answers[0].rows)
            estimate = estimate_from_sums(known, scores, **known_here)
        else:
            how_far = asked.request.preprocessing, asked.request.inputs
            known_here |= {"apart": distance_here(holding, answers[0].rows, *how_far)}
            estimate = estimate_from_pooled(pooled.pooled, scores, **known_here)
        if estimate.sites:
            how = _by_sums(asked.request) if estimate.looked_at else _why_scores_alone(asked.request)
            if known_here.get("apart") is not None and not estimate.looked_at:
                how = f"{how}; {WARNED_BY_SUMS}"
            estimate = replace(estimate, reasons=(*estimate.reasons, how))
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


def in_words(estimate: Estimate) -> str:
    """An estimate in a line."""
    if estimate.estimate is None:
        return f"no estimate of its accuracy here: {estimate.reasons[0]}"
    warning = "; it may do much worse here: have some samples labelled" if estimate.harmful else ""
    ends = f"{estimate.low:.1f} to {estimate.high:.1f} in {LEVEL:.0%} of cases"
    return f"accuracy here, estimated: {estimate.estimate:.1f} % ({ends}){warning}"


def _by_sums(request: EstimateRequest) -> str:
    """Whose sums of inputs an estimate reads, in words."""
    without = _without_sums(request)
    return f"{BY_SUMS}; none come from {without}" if without else BY_SUMS


def _why_scores_alone(request: EstimateRequest) -> str:
    """Why an estimate reads scores alone, in words."""
    without = _without_sums(request)
    some = any(site.looked is not None for site in request.known.values())
    return f"{NOT_LOOKED_AT}, since no sums of inputs come from {without}" if some and without else NOT_LOOKED_AT


def _without_sums(request: EstimateRequest) -> str:
    """The sites that tell nothing of their samples under changes, at most five."""
    names = [f"'{name}'"[:100] for name, site in request.known.items() if site.looked is None]
    return ", ".join(names[:5])


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
