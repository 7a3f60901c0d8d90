"""Fine-tuning: after the last round each site trains the run's model on, and predicts with what comes of it.

``fine_tune: {epochs: 5}`` or ``{steps: 100}`` stands beside every method whose sites train the common model. It is the
baseline of every table of personalization (Wang et al., Federated Evaluation of On-device Personalization, arXiv
1910.10252), and the last step of some methods. The tuned model never leaves its site.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class FineTune(BaseModel):
    """How long a site trains the final model on, and with which learning rate. It is on top of the equal work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: PositiveInt | None = Field(None, description="passes over the site's training samples")
    steps: PositiveInt | None = Field(None, description="mini-batches instead of epochs")
    lr: PositiveFloat | None = Field(None, description="learning rate; none: training.lr, without its schedule")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("write either epochs or steps, such as fine_tune: {epochs: 5}")
        return self
