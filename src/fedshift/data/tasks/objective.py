"""What networks learn: the loss of a task, and what a network's outputs say of a sample.

A run has one objective. It is made from the data's preprocessing, so that sites, the server and a model file have the
same one: `objective_of`. Whoever trains, measures or predicts asks it, and none of them asks for the task's name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, PositiveFloat, ValidationError
from torch import Tensor
from torch.nn import functional

from fedshift.data.domain import Preprocessing, Task
from fedshift.errors import UserError
from fedshift.functional.losses import smoothed_cross_entropy, task_loss
from fedshift.functional.survival import MeanOver, partial_likelihood
from fedshift.section import Section


class Objective(Section, ABC):
    """Base of the objectives."""

    task: Task  # what is learned
    by_sample: ClassVar[bool] = True  # whether the loss of a mini-batch is the mean of a loss of each sample
    has_probabilities: ClassVar[bool] = False

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of a mini-batch, a scalar.

        ``outputs``: what the network says, (n, outputs) or for masks (n, structures, h, w).
        """

    def smoothed_loss(self, outputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """The loss with smoothed labels, where labels are classes; of others there is nothing to smooth."""
        return self.loss(outputs, labels)

    def loss_of_some(self, chosen: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of the ``chosen`` samples of a mini-batch, (n,) of booleans; 0 if none is chosen."""
        return self.loss(outputs[chosen], labels[chosen]) if chosen.any() else outputs.sum() * 0.0

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """What is told of each sample (n, outputs): probabilities, or values in the label's unit."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """The prediction for each sample: class numbers, values or hazards (n,), or 0 and 1 (n, labels)."""

    def together(self, outputs: Tensor) -> Tensor:
        """What several networks say together: outputs (networks, n, outputs) → (n, outputs)."""
        return outputs.mean(0)

    def predictions(self, scores: NDArray[Any], names: NDArray[Any]) -> NDArray[Any]:
        """The predictions that a user sees, from `scores`: values (n,), names of classes (n,), or 0/1 (n, labels)."""
        return scores[:, 0]

    def in_words(self, prediction: Any, names: Sequence[str]) -> str | float:
        """One entry of `predictions` as a name or a number."""
        in_words: str | float = prediction
        return in_words

    @abstractmethod
    def describe(self, names: Sequence[str]) -> str:
        """What a model gives, in words; ``names``: the classes, or the label."""


class Classes(Objective):
    """Classification by cross-entropy, and segmentation, whose labels are masks, by the Dice loss."""

    task: Literal["classification"] = "classification"
    has_probabilities: ClassVar[bool] = True

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return task_loss(outputs, labels)

    def smoothed_loss(self, outputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return smoothed_cross_entropy(outputs, labels, smoothing)

    def loss_of_some(self, chosen: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, labels, reduction="none")
        return (losses * chosen).sum() / chosen.sum().clamp_min(1)

    def predictions(self, scores: NDArray[Any], names: NDArray[Any]) -> NDArray[Any]:
        chosen: NDArray[Any] = names[scores.argmax(axis=1)]
        return chosen

    def describe(self, names: Sequence[str]) -> str:
        return f"probabilities of the classes {', '.join(names)}"

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def together(self, outputs: Tensor) -> Tensor:
        """The logarithm of the mean of their probabilities."""
        return outputs.log_softmax(2).logsumexp(0) - math.log(len(outputs))


class Regression(Objective):
    """A quantity. Networks say it standardised: in deviations from the mean of the sources."""

    task: Literal["regression"] = "regression"
    # the loss of the standardised label
    loss_name: Literal["squared", "absolute", "huber"] = Field("squared", alias="loss")
    huber_delta: PositiveFloat = 1.0  # from this error on Huber's loss is linear
    mean: FiniteFloat = 0.0  # of the label at the sites that may be used
    std: float = Field(1.0, gt=0, allow_inf_nan=False)  # its deviation there

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        predicted, true = outputs[:, 0], ((labels - self.mean) / self.std).to(outputs.dtype)
        if self.loss_name == "absolute":
            return functional.l1_loss(predicted, true)
        if self.loss_name == "huber":
            return functional.huber_loss(predicted, true, delta=self.huber_delta)
        return functional.mse_loss(predicted, true)

    def describe(self, names: Sequence[str]) -> str:
        return f"{names[0]}, in its own unit"

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs * self.std + self.mean

    def predict(self, outputs: Tensor) -> Tensor:
        return self.scores(outputs.double())[:, 0].float()


class TimeToEvent(Objective):
    """Who has an event sooner, by Cox's partial likelihood. Networks say the logarithm of a relative hazard.

    A sample is compared with those of its own mini-batch that were observed as long.
    """

    task: Literal["time_to_event"] = "time_to_event"
    mean_over: MeanOver = "events"  # of what the loss of a mini-batch is the mean
    by_sample: ClassVar[bool] = False

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return partial_likelihood(outputs[:, 0], labels[:, 0], labels[:, 1], self.mean_over)

    def describe(self, names: Sequence[str]) -> str:
        return f"the logarithm of the relative hazard, larger for an earlier event, by {names[0]}"

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]


class MultiLabel(Objective):
    """Which of several labels a sample has, by binary cross-entropy, mean over samples and labels."""

    task: Literal["multi_label"] = "multi_label"
    has_probabilities: ClassVar[bool] = True

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, labels)

    def describe(self, names: Sequence[str]) -> str:
        return f"probabilities of each of the labels {', '.join(names)}"

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def predict(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).float()

    def together(self, outputs: Tensor) -> Tensor:
        """The logits of the mean of their probabilities."""
        return outputs.double().sigmoid().mean(0).logit(eps=1e-12).to(outputs.dtype)

    def predictions(self, scores: NDArray[Any], names: NDArray[Any]) -> NDArray[Any]:
        return (scores > 0.5).astype(np.int64)

    def in_words(self, prediction: Any, names: Sequence[str]) -> str | float:
        """The labels that the sample has."""
        return ", ".join(name for name, has in zip(names, prediction, strict=True) if has)


CLASSES = Classes()
_OBJECTIVES: dict[str, type[Objective]] = {
    "regression": Regression,
    "time_to_event": TimeToEvent,
    "multi_label": MultiLabel,
}


def objective_of(preprocessing: Preprocessing) -> Objective:
    """The objective of data with this preprocessing. UserError if it is damaged, as in a stranger's file or message."""
    if preprocessing.objective is None:
        return CLASSES
    kind = _OBJECTIVES.get(str(preprocessing.objective.get("task")))
    try:
        if kind is None:
            raise ValueError
        return kind.model_validate(preprocessing.objective)
    except (ValidationError, ValueError):
        raise UserError(
            "the objective of the data is damaged: it needs a task, and for regression a finite mean and a std above 0"
        ) from None
