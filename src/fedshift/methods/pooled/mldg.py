"""MLDG: steps that help some domains must help the others.

Li, Yang, Song, Hospedales: Learning to Generalize: Meta-Learning for Domain Generalization. AAAI 2018, arXiv
1710.03463, algorithm 1.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In every step some sources, drawn anew, are the meta-test domains and the others the meta-train domains:
    F(θ) = mean over the meta-train domains of L_e(θ),   θ' = θ − α ∇F(θ)
    θ ← θ − η ∇ [F(θ) + β G(θ')],   G(θ') = mean over the meta-test domains of L_e(θ')                 (3)

Where papers and code differ, and what was chosen
 1. α is the learning rate unless ``inner_rate`` sets it. The gradient passes through the inner step
    (``second_order``), as in the paper.
 2. ``setting: domainbed`` (facebookresearch/DomainBed, domainbed/algorithms.py, MLDG and domainbed/lib/misc.py,
    split_meta_train_test): two meta-test domains; every meta-train domain takes an inner step for itself and is tested
    on one of the meta-test domains in turn (``pairs``); the sum is divided by K, though there are K − 2 pairs; first
    order; the inner step is the first of a fresh Adam, α g/(|g| + 1e-8).
 3. One meta-test domain by default, as in the authors' code (HAHA-DL/MLDG, main_mldg.py and model.py, ModelMLDG.train),
    which adds the meta-train losses where the paper has their mean.
 4. Virtual steps leave BatchNorm's running statistics as they are.
 5. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.2, PACS 84.9, OfficeHome 66.8,
TerraIncognita 47.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.site import Batch
from fedshift.functional.meta_learning import answer_at, inner_step
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step

ADAM_EPSILON = 1e-8


class MLDG(DomainLoss):
    """Losses of some domains, and those of the others after a virtual step."""

    traits = DomainLoss.traits.derive(
        name="mldg",
        citation="Li et al., AAAI 2018",
        group="pooled",
        advice="The reference of methods with episodes; three domains or more.",
        settings={
            "domainbed": {"meta_test": 2, "episodes": "pairs", "second_order": False, "inner_optimizer": "adam"},
        },
        tasks=WITHOUT_MASKS,
        thaws=False,
        relative_cost=2.5,
        own_gradients=True,
        tests=MethodTests(options={"second_order": tries(False, inner_rate=0.5)}),
    )

    beta: NonNegativeFloat = Field(1.0, description="β: weight of the meta-test domains")
    meta_test: PositiveInt = Field(1, description="meta-test domains; at most all but one")
    episodes: Literal["together", "pairs"] = Field(
        "together",
        description="one virtual step of all meta-train domains; or one of each, tested on one meta-test domain",
    )
    inner_rate: PositiveFloat | None = Field(None, description="α; none = the learning rate")
    inner_optimizer: Literal["sgd", "adam"] = Field("sgd", description="what takes the virtual step")
    second_order: bool = Field(True, description="whether gradients pass through the virtual step")

    def loss(self, step: Step) -> Tensor:
        order = torch.randperm(len(step.batches), generator=step.draws).tolist()
        held_out = min(self.meta_test, len(order) - 1)
        train = [step.batches[number] for number in order[: len(order) - held_out]]
        test = [step.batches[number] for number in order[len(order) - held_out :]]
        if not test:
            return step.losses.mean()
        if self.episodes == "together":
            return self.episode(step, train, test)
        pairs = [self.episode(step, [item], [test[index % len(test)]]) for index, item in enumerate(train)]
        return torch.stack(pairs).sum() / len(order)

    def episode(self, step: Step, train: Sequence[Batch], test: Sequence[Batch]) -> Tensor:
        """F(θ) + β G(θ')."""
        loss_of = step.site.objective.loss
        near = torch.stack([loss_of(step.model(batch.inputs), batch.targets) for batch in train]).mean()
        trained = {name: value for name, value in step.model.named_parameters() if value.requires_grad}
        gradients = torch.autograd.grad(
            near, list(trained.values()), retain_graph=True, create_graph=self.second_order, materialize_grads=True
        )
        if self.inner_optimizer == "adam":
            gradients = tuple(gradient / (gradient.abs() + ADAM_EPSILON) for gradient in gradients)
        rate = self.inner_rate or step.site.learning_rate
        ahead = inner_step(trained, gradients, rate, second_order=self.second_order)
        far = [loss_of(answer_at(step.model, ahead, batch.inputs), batch.targets) for batch in test]
        return near + self.beta * torch.stack(far).mean()
