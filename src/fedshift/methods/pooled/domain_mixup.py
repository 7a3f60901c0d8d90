"""Mixup between domains: samples of two sources are mixed, and so are their losses.

Yan, Song, Li, Zou, Ren: Improve Unsupervised Domain Adaptation with Mixup Training. 2020, arXiv 2001.00677, as
DomainBed runs it.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

The sources stand in a circle, in an order drawn anew in every step; e' is next to e:
    x̃ = λ_e x_e + (1 − λ_e) x_e',  λ_e ~ Beta(α, α)
    L(θ) = 1/K Σ_e λ_e CE(x̃, y_e) + (1 − λ_e) CE(x̃, y_e')

Where papers and code differ, and what was chosen. DomainBed: `Mixup` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. This is DomainBed's Mixup (facebookresearch/DomainBed, domainbed/algorithms.py, Mixup; lib/misc.py,
    random_pairs_of_minibatches), with its α = 0.2. The paper mixes a source with a target that has no labels; here and
    in DomainBed sources are mixed, and the target is unseen.
 2. The plug-in ``mixup`` of `deepall` is another one: its partners are of any domain, and a step has one λ.
 3. Of two batches of unequal length the rest of the longer is left out, as in DomainBed.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.4, PACS 84.6, OfficeHome 68.1,
TerraIncognita 47.9.
"""

from __future__ import annotations

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.functional.mixing import mixed_inputs
from fedshift.methods.composition.mixstyle import beta
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step


class DomainMixup(DomainLoss):
    """The loss of samples that are mixed with those of another domain."""

    traits = DomainLoss.traits.derive(
        name="domain_mixup",
        citation="Yan et al., 2020",
        group="pooled",
        advice="The Mixup of DomainBed's tables; the plug-in mixup of deepall mixes samples of any domain.",
        tasks=WITHOUT_MASKS,
        tests=MethodTests(options={"alpha": tries(5.0)}),
    )

    alpha: PositiveFloat = Field(0.2, description="α of λ ~ Beta(α, α)")

    def loss(self, step: Step) -> Tensor:
        order = torch.randperm(len(step.batches), generator=step.draws).tolist()
        circle = zip(order, [*order[1:], order[0]], beta(self.alpha, len(order), step.draws).tolist(), strict=True)
        return torch.stack([self.mixed_loss(step, *pair) for pair in circle]).mean()

    def mixed_loss(self, step: Step, number: int, partner: int, share: float) -> Tensor:
        """The loss of one domain's batch mixed with another's."""
        size = min(len(step.batches[number].inputs), len(step.batches[partner].inputs))
        first, second = (step.batches[index].part(slice(size)) for index in (number, partner))
        logits = step.model(mixed_inputs(first.inputs, second.inputs, share))
        loss_of = step.site.objective.loss
        return share * loss_of(logits, first.targets) + (1 - share) * loss_of(logits, second.targets)
