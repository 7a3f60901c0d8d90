"""MIRO: features stay near those of the network that training began with.

Cha, Lee, Park, Chun: Domain Generalization by Mutual-Information Regularization with Pre-trained Models. ECCV 2022,
arXiv 2203.10789.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

z_l are the outputs of a stage of the network, z_l^0 those of the network as it was at the start, which stands in for
an oracle; σ_l² is a trained variance for each channel of a stage:
    L(θ) = CE + λ/2 Σ_l mean(log σ_l² + (z_l − z_l^0)²/σ_l²)
which is a bound of the mutual information of both, with a Gaussian whose mean is z_l.

Where papers and code differ, and what was chosen. Code: kakaobrain/miro, domainbed/algorithms/miro.py.
 1. σ_l² = softplus(b) + 1e-5 and begins at 0.1; its rate is ten times that of the network (config.yaml: lr_mult). The
    code's means over samples, positions and channels are here, too.
 2. λ = 0.1 is the code's default; its searched values are 0.01 for PACS and VLCS.
 3. Stages are all that the network names (``stages``); the code has the stem and the four blocks of a ResNet.
 4. The code freezes BatchNorm of both networks. Here that of the start is frozen, and that of the trained one trains.
 5. **It regularises towards a pre-trained network.** One that was drawn at random teaches nothing.
 6. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (paper, ResNet-50, training-domain validation): PACS 85.4, OfficeHome 70.5, TerraIncognita 50.4; with
VLCS and DomainNet 65.9 on average.
"""

from __future__ import annotations

import copy
import math

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError, nearest
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights

EPSILON = 1e-5


class MIRO(PooledTraining):
    """The task's loss, and how far stages are from where they began, in deviations that are trained."""

    traits = PooledTraining.traits.derive(
        name="miro",
        citation="Cha et al., ECCV 2022",
        group="pooled",
        advice="For pre-trained networks that know more than the sources show; nothing for one drawn at random.",
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer", "deviations", "parts"),
        relative_cost=1.4,
        tests=MethodTests(
            options={
                "penalty_weight": tries(0.0, 2.0),
                "first_variance": tries(1.0, penalty_weight=2.0),
                "rate_factor": tries(1.0, penalty_weight=2.0),
                "stages": tries(("conv2",), penalty_weight=2.0),
            },
        ),
    )

    penalty_weight: NonNegativeFloat = Field(0.1, description="λ: weight of the penalty")
    first_variance: PositiveFloat = Field(0.1, description="σ² at the start")
    rate_factor: PositiveFloat = Field(10.0, description="rate of σ² beside the network's")
    stages: tuple[str, ...] | None = Field(None, description="which stages stay near; none = all")

    def check(self, network: Network) -> None:
        super().check(network)
        for stage in self.stages or ():
            if stage not in network.stages:
                raise UserError(f"{self.name}.stages: there is no stage '{stage}'; {nearest(stage, network.stages)}")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        stages = tuple(model.stages) if self.stages is None else self.stages
        parts = self.parts(
            site, lambda: Oracle(model, stages, next(iter(site.all_batches())).inputs[:1], self.first_variance)
        )
        deviations = site.optimizer(parts.deviations, memory="deviations")
        for group in deviations.param_groups:
            group["lr"] *= self.rate_factor

        def loss_of(batch: Batch) -> Tensor:
            logits, result = model.with_stages(batch.inputs, stages)
            return site.objective.loss(logits, batch.targets) + self.penalty_weight * parts.distance(
                batch.inputs, result
            )

        optimizers = {"optimizer": site.optimizer(model, memory="optimizer"), "deviations": deviations}
        return self.train(site, self.of_all(site, steps), loss_of, model, parts, optimizers)


class Oracle(nn.Module):
    """The network as it was at the start, and the deviations of its stages.

    ``inputs``: a sample, (1, …). ``variance``: σ² at the start.
    """

    def __init__(self, network: Network, stages: tuple[str, ...], inputs: Tensor, variance: float) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False).eval()
        self.stages = stages
        with torch.no_grad():
            _, result = self.network.with_stages(inputs, stages)
        start = math.log(math.expm1(variance - EPSILON))
        self.deviations = nn.ParameterList(
            torch.full((1, value.shape[1], *[1] * (value.dim() - 2)), start) for value in result.values()
        )

    def train(self, mode: bool = True) -> Oracle:
        """Only the deviations train."""
        return self

    def distance(self, inputs: Tensor, features: dict[str, Tensor]) -> Tensor:
        """½ Σ_l mean(log σ_l² + (z_l − z_l^0)²/σ_l²) for the stages of the trained network, by name."""
        with torch.no_grad():
            _, wanted = self.network.with_stages(inputs, self.stages)
        terms = []
        for name, deviation in zip(self.stages, self.deviations, strict=True):
            variance = functional.softplus(deviation) + EPSILON
            terms.append(((features[name] - wanted[name]).square() / variance + variance.log()).mean())
        return torch.stack(terms).sum() / 2
