"""Base of the pooled methods with one loss over a batch of every domain, and of those whose loss has a penalty.

    L(θ) = 1/K Σ_e L_e(θ) + λ P(θ)

The steps of a run are counted in the pool's memory, for what begins at a step. All domains pass the network in one
batch, so BatchNorm normalises them together.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor, nn
from torch.optim import Optimizer

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass
class Step:
    """A step of the optimiser: a batch of every domain, what trains, and what the network says of the batches."""

    number: int  # how many steps of the run were before this one
    site: Site  # the pool
    model: Network  # the network that is published
    parts: nn.Module  # what `DomainLoss.build_parts` made
    optimizer: Optimizer  # the experiment's, of the model and the parts
    batches: Sequence[Batch]  # one of every domain
    draws: torch.Generator  # for what is random in a step

    @property
    def inputs(self) -> Tensor:
        """All inputs, domain after domain."""
        return torch.cat([batch.inputs for batch in self.batches])

    @property
    def labels(self) -> Tensor:
        """All labels, domain after domain."""
        return torch.cat([batch.targets for batch in self.batches])

    def by_domain(self, values: Tensor) -> tuple[Tensor, ...]:
        """Values of all samples, one tensor for each domain."""
        return torch.split(values, [len(batch.inputs) for batch in self.batches])

    @cached_property
    def features(self) -> Tensor:
        """The features of all samples, (n, d)."""
        features: Tensor = self.model.features(self.inputs)
        return features

    @cached_property
    def logits(self) -> Tensor:
        """The network's outputs for all samples, (n, C)."""
        logits: Tensor = self.model.classifier(self.features)
        return logits

    @cached_property
    def losses(self) -> Tensor:
        """L_e: the mean loss of each domain's batch, (K,)."""
        pairs = zip(self.by_domain(self.logits), self.batches, strict=True)
        return torch.stack([self.site.objective.loss(logits, batch.targets) for logits, batch in pairs])


class Parts(nn.Module):
    """What stays at the pool: how many steps of the run are done, and what the method has beside the model."""

    done: Tensor

    def __init__(self, others: nn.Module) -> None:
        super().__init__()
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))
        self.others = others


class DomainLoss(DomainTraining):
    """Base of methods with one loss over a batch of every domain. A subclass writes `loss`."""

    traits = DomainTraining.traits.derive()

    def build_parts(self, model: Network, domains: int) -> nn.Module:
        """What the method has beside the model: modules that train with it, or buffers alone."""
        return nn.Module()

    @abstractmethod
    def loss(self, step: Step) -> Tensor:
        """The loss of a step."""

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(self.build_parts(model, site.domains)))
        optimizer = site.optimizer(model, parts, memory="optimizer")
        numbers, draws = itertools.count(int(parts.done)), site.generator_for("step draws")

        def loss_of(batches: tuple[Batch, ...]) -> Tensor:
            parts.done += 1
            return self.loss(Step(next(numbers), site, model, parts.others, optimizer, batches, draws))

        batches = self.of_sources(site, steps)
        return self.train(site, batches, loss_of, model, parts, {"optimizer": optimizer})


class DomainPenalty(DomainLoss):
    """Base of methods that add a penalty to the mean of the domains' losses. A subclass writes `penalty`."""

    traits = DomainLoss.traits.derive(tests=MethodTests(options={"penalty_weight": tries(0.0, 5.0)}))

    penalty_weight: NonNegativeFloat = Field(1.0, description="λ: weight of the penalty")

    @abstractmethod
    def penalty(self, step: Step) -> Tensor:
        """P, a scalar."""

    def weight_at(self, step: Step) -> float:
        """λ at a step."""
        return self.penalty_weight

    def loss(self, step: Step) -> Tensor:
        return step.losses.mean() + self.weight_at(step) * self.penalty(step)


class LaterPenalty(DomainPenalty):
    """Base of methods whose penalty has its weight from a step on, and another one before."""

    traits = DomainPenalty.traits.derive(
        tests=MethodTests(
            options={
                "penalty_weight": tries(0.0, 2.0, penalty_start=1),
                "penalty_start": tries(1),
                "weight_before": tries(1.0, penalty_start=1),
                "rescaled": tries(False, penalty_start=1, penalty_weight=5.0),
                "restart_optimizer": tries(True, where="normed with momentum", penalty_start=1),
            },
        ),
    )

    penalty_start: NonNegativeInt = Field(0, description="steps of the run before the penalty has its weight")
    weight_before: NonNegativeFloat = Field(1.0, description="weight of the penalty until then")
    rescaled: bool = Field(False, description="whether the whole loss is divided by a weight above 1")
    restart_optimizer: bool = Field(
        False, description="whether the optimiser forgets its moments when the penalty gets its weight"
    )

    def weight_at(self, step: Step) -> float:
        return self.penalty_weight if step.number >= self.penalty_start else self.weight_before

    def loss(self, step: Step) -> Tensor:
        if self.restart_optimizer and step.number == self.penalty_start:
            step.optimizer.state.clear()
        loss = super().loss(step)
        return loss / max(1.0, self.weight_at(step)) if self.rescaled else loss
