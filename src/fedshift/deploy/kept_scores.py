"""What a left-out site keeps of a run's last model on its own disk: scores, for a reading or a sum later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedshift.deploy.remote.requests import SCORES
from fedshift.encryption import read_private, write_private
from fedshift.evaluation.estimate.combination import Answers, LeftOut
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.sums import SiteSums, sums_of
from fedshift.json_objects import read_object, write_object

READING = "-reading.json"
_REMEDY = "delete it, and deploy again for an estimate"


@dataclass(frozen=True)
class KeptScores:
    """What a run's last model says of a site's samples."""

    scores: NDArray[Any]  # probabilities (n, classes)
    labels: NDArray[np.int64]  # class numbers (n,)
    threshold: float = 0.5  # of two classes, the score from which the second one is called
    looked_at: tuple[Answers, ...] = ()  # of some of the samples: as they are, first, and under changes

    @property
    def left_out(self) -> LeftOut:
        """The same as estimates read it."""
        return LeftOut(self.scores, self.labels, self.looked_at, self.threshold)

    @property
    def sums(self) -> SiteSums:
        """Their sums."""
        return sums_of(self.scores, self.labels, self.threshold)


def keep_scores(memory: Path, run: str, case: KeptScores) -> None:
    """Keep the scores of a run's last model beside the memory of the run. No reading was made of them."""
    parts = {"scores": case.scores, "labels": case.labels, "threshold": np.array([case.threshold])}
    for number, answers in enumerate(case.looked_at):
        apart = answers.apart
        parts |= {
            f"{number}.scores": answers.scores,
            f"{number}.labels": answers.labels,
            f"{number}.nearby": answers.nearby,
            f"{number}.apart": np.array([] if apart is None else _numbers(apart)),
        }
    write_private(memory / f"{run}{SCORES}", save({name: _tensor(part) for name, part in parts.items()}))
    (memory / f"{run}{READING}").unlink(missing_ok=True)


def kept_scores(memory: Path, run: str) -> KeptScores | None:
    """The scores that were kept; None if there are none."""
    try:
        result = load(read_private(memory / f"{run}{SCORES}", _REMEDY))
        parts = {name: tensor.numpy() for name, tensor in result.items()}
        looked_at = tuple(_kept_answers(parts, number) for number in range(len(parts) // 4))
        return KeptScores(parts["scores"], parts["labels"], float(parts["threshold"][0]), looked_at)
    except (OSError, KeyError, SafetensorError):
        return None


def _kept_answers(parts: Mapping[str, NDArray[Any]], number: int) -> Answers:
    scores, labels, nearby, apart = (parts[f"{number}.{name}"] for name in ("scores", "labels", "nearby", "apart"))
    spread, moved, *skewed = apart.tolist() or (0.0, 0.0)
    return Answers(scores, labels, nearby, Apart(spread, None, moved, *skewed) if len(apart) else None)


def _numbers(apart: Apart) -> list[float]:
    return [apart.spread, apart.moved, *([] if apart.skewed is None else [apart.skewed])]


def note_reading(memory: Path, run: str, key: str) -> None:
    """Note the key of the one request for a reading."""
    write_object(memory / f"{run}{READING}", {"key": key}, private=True)


def asked_reading(memory: Path, run: str) -> str | None:
    """The key that was noted; None if there is none."""
    result = read_object(memory / f"{run}{READING}", _REMEDY, older=True)
    return None if not result else str(result["key"])


def _tensor(scores: NDArray[Any]) -> Any:
    import torch

    return torch.tensor(np.ascontiguousarray(scores))  # a copy: a file's tensors share no memory
