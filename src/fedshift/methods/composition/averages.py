"""The model that a run hands out: its last one, or an average of those of several rounds.

``average: swa``, ``average: {kind: ema, decay: 0.95}`` and ``average: swad`` go with every method, and so does
``average_rounds: 5``, the mean of the last rounds. Training does not see the average. It is computed where the rounds
run, so nothing more is sent. What it remembers is in the checkpoint.

BatchNorm's statistics are averaged like weights. The papers pass over the data once more to compute them; a server has
no data.

Sources: SWA: Izmailov et al., UAI 2018, over rounds of a federation Caldarola et al., ECCV 2022; SWAD: Cha et al.,
NeurIPS 2021.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from fedshift.functional.averaging import weighted_average
from fedshift.methods.choices import read_choice
from fedshift.weights import Weights


@dataclass(frozen=True)
class Kept:
    """What an average remembers: plain data, since it goes into the checkpoint."""

    recent: tuple[Weights, ...] = ()  # models of the last rounds, the newest last
    mean: Weights | None = None  # of models of earlier rounds
    count: int = 0  # of those models
    losses: tuple[float, ...] = ()  # of the rounds' models on the sources' held-out parts

    def with_mean(self, *models: Weights, share: float | None = None) -> Kept:
        """The same with further models in the mean; ``share`` is the mean's so far, None gives each model the same."""
        mean, count = self.mean, self.count
        for model in models:
            old = count / (count + 1) if share is None else share
            mean = model if mean is None else weighted_average([mean, model], [old, 1 - old])
            count += 1
        return replace(self, mean=mean, count=count)


class Averaging(BaseModel, ABC):
    """Base of the averages; ``judges`` says whether one looks at the sources' held-out parts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    judges: ClassVar[bool] = False

    @abstractmethod
    def after(self, kept: Kept, model: Weights, done: float) -> Kept:
        """What is remembered after a round that made ``model``; ``done`` is the share of the rounds that are over."""

    def judge(self, kept: Kept, measured: Mapping[str, float], less_is_better: bool = False) -> Kept:
        """What is remembered once the round's model was measured at the sources. Not after the last one.

        ``measured``: source → percent, or with ``less_is_better`` an error.
        """
        return kept

    @abstractmethod
    def handed_out(self, kept: Kept, *, last: bool) -> Weights | None:
        """The model that is measured and written down after a round; None: the one that the round made."""


class LastRounds(Averaging):
    """The mean of the last rounds' models: the option ``average_rounds``."""

    rounds: PositiveInt

    def after(self, kept: Kept, model: Weights, done: float) -> Kept:
        return Kept((*kept.recent, model)[-self.rounds :]) if self.rounds > 1 else Kept()

    def handed_out(self, kept: Kept, *, last: bool) -> Weights | None:
        return weighted_average(kept.recent, [1.0] * len(kept.recent)) if kept.recent else None


class SWA(Averaging):
    """The mean of the models of all rounds after the start."""

    kind: Literal["swa"] = "swa"
    start: Annotated[float, Field(ge=0, lt=1)] = Field(0.75, description="share of the rounds that are left out")

    def after(self, kept: Kept, model: Weights, done: float) -> Kept:
        return kept.with_mean(model) if done > self.start else kept

    def handed_out(self, kept: Kept, *, last: bool) -> Weights | None:
        return kept.mean


class EMA(Averaging):
    """An exponential average: ``m ← d·m + (1 − d)·θ``, d at most 1 − 1/t in round t, so that the start is forgotten."""

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="d: what is kept of the average in a round")

    def after(self, kept: Kept, model: Weights, done: float) -> Kept:
        return kept.with_mean(model, share=min(self.decay, 1 - 1 / (kept.count + 1)))

    def handed_out(self, kept: Kept, *, last: bool) -> Weights | None:
        return kept.mean


class SWAD(Averaging):
    """The mean of the models of a dense window of rounds, which the sources' held-out parts choose.

    The loss is the share of held-out samples that are predicted wrongly, since sites report accuracies; or the error
    that they report, such as the RMSE. Each round is
    measured by its own model; the mean is measured and handed out after the last round. If no window has begun by
    then, the last round's model is handed out.
    """

    judges: ClassVar[bool] = True

    kind: Literal["swad"] = "swad"
    settled: PositiveInt = Field(3, description="N_s: the window begins where so many losses have their least first")
    patience: PositiveInt = Field(6, description="N_e: it ends before so many losses above the tolerance")
    tolerance: Annotated[float, Field(ge=1)] = Field(1.3, description="r: times the mean loss where the window begins")

    def after(self, kept: Kept, model: Weights, done: float) -> Kept:
        return kept if self._window(kept)[1] is not None else replace(kept, recent=(*kept.recent, model))

    def judge(self, kept: Kept, measured: Mapping[str, float], less_is_better: bool = False) -> Kept:
        if not measured:  # no source answered: the round counts like the one before
            loss = kept.losses[-1] if kept.losses else 100.0
        else:
            mean = sum(measured.values()) / len(measured)
            loss = mean if less_is_better else 100 - mean
        kept = replace(kept, losses=(*kept.losses, loss))
        start, end = self._window(kept)
        number = len(kept.losses)
        first = number - len(kept.recent)  # the round of the first recent model; meaningless once the window has ended
        if start is None:
            return replace(kept, recent=kept.recent[max(0, number - self.settled + 1 - first) :])
        sure = number - self.patience + 1 if end is None else end
        inside = [model for index, model in enumerate(kept.recent, first) if start <= index < sure]
        later = [model for index, model in enumerate(kept.recent, first) if index >= max(start, sure)]
        return replace(kept.with_mean(*inside), recent=tuple(later) if end is None else ())

    def handed_out(self, kept: Kept, *, last: bool) -> Weights | None:
        if not last or self._window(kept)[0] is None:
            return None
        return kept.with_mean(*kept.recent).mean

    def _window(self, kept: Kept) -> tuple[int | None, int | None]:
        return dense_window(kept.losses, self.settled, self.patience, self.tolerance)


AnyAverage = SWA | EMA | SWAD
AVERAGES: Mapping[str, type[AnyAverage]] = {kind.model_fields["kind"].default: kind for kind in get_args(AnyAverage)}


def _read(value: Any) -> Any:
    return read_choice(value, "kind", AVERAGES, "average")


AverageOption = Annotated[Annotated[AnyAverage, Field(discriminator="kind")] | None, BeforeValidator(_read)]
"""The field ``average`` of a method."""


def dense_window(losses: Sequence[float], settled: int, patience: int, ratio: float) -> tuple[int | None, int | None]:
    """The models that SWAD averages, by their validation losses so far (Cha et al., NeurIPS 2021).

    The window begins at the first model whose loss is the least of ``settled`` in a row. It ends before the first
    ``patience`` losses in a row that are all above the tolerance: ``ratio`` times the mean of the losses with which it
    began.
    """
    runs = range(len(losses) - settled + 1)
    start = next((first for first in runs if losses[first] == min(losses[first : first + settled])), None)
    if start is None:
        return None, None
    tolerance = ratio * sum(losses[start : start + settled]) / settled
    ends = range(start + 1, len(losses) - patience + 1)
    return start, next((end for end in ends if min(losses[end : end + patience]) > tolerance), None)
