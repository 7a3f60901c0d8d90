"""No model that was adapted to a site is handed out there if the site's samples are too unlike those that trained."""

from __future__ import annotations

import json
from pathlib import Path

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.stored import RESULT, read_stored
from fedshift.experiment.estimate import estimate_at_run
from fedshift.experiment.predict import TrainedModel

ESTIMATE = "estimate.json"
"""In a folder that a deployed site received: what to expect of the model there."""


def check_adapted(trained: TrainedModel, folder: Path | None, *, accept: bool) -> None:
    """Refuse a model that was adapted to a site without labels whose samples are too unlike, unless that is accepted.

    Args:
        folder: of its run, or what a deployed site received; None: nothing is known, and nothing refused.
        accept: whether it is wanted all the same.

    Raises:
        UserError: it is refused; or what the run noted is damaged.
    """
    if accept or folder is None or "adapted_to" not in trained.metadata:
        return
    if (reason := too_unlike(folder)) is not None:
        raise UserError(
            f"this model was adapted to '{trained.metadata['adapted_to']}', and is not handed out: {reason}. Take one "
            "that was not adapted, such as fedavg's, or this one all the same: --accept-shift, in Python "
            "accept_shift=True"
        )


def too_unlike(folder: Path) -> str | None:
    """How the samples of a run's target without labels are too unlike for an estimate; None if they are not.

    Example:
        >>> too_unlike(Path("no-run")) is None
        True
    """
    file = folder / ESTIMATE
    if file.is_file():
        try:
            answer = json.loads(file.read_text(encoding="utf-8"))
            return str(answer["reasons"][0]) if answer["too_unlike"] is True else None
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            raise UserError(f"{file} is damaged: deploy again, and the site estimates anew") from None
    if (text := read_stored(folder / RESULT)) is None:
        return None
    try:
        result = RunResult.model_validate_json(text.data)
    except ValueError:
        raise UserError(f"{text.where()} cannot be read: remove it and run the experiment again") from None
    if not result.without_labels:
        return None
    estimate = estimate_at_run(folder, result)
    return estimate.reasons[0] if estimate.too_unlike else None
