"""MixStyle: the styles of feature maps are mixed between samples.

Zhou, Yang, Qiao, Xiang: Domain Generalization with MixStyle. ICLR 2021.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In training, with probability p in each forward pass, behind each of some stages of the network
    MixStyle(x) = γ_mix · (x − μ(x))/σ(x) + β_mix                                      (5)
    γ_mix = λσ(x) + (1−λ)σ(x̃),  β_mix = λμ(x) + (1−λ)μ(x̃),  λ ~ Beta(α, α)            (3, 4)
where x̃ is the batch in another order, μ and σ are a sample's mean and deviation per channel, held constant.

Where papers and code differ, and what was chosen
 1. ``partners: cross_domain`` takes each partner from another domain (the paper's "MixStyle w/ domain label");
    ``random`` is a plain shuffle.
 2. The paper mixes behind residual blocks 1 to 3 for PACS and 1 to 2 for Office-Home. Default here: behind every stage
    that has positions, except the last stage of the network.
 3. Whether a pass is mixed, and λ and the partners, are drawn for each stage anew, as in the code.

Should reproduce: PACS ResNet-18 84.1, 78.8, 96.1, 75.9 (83.7).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedshift.data.domain import Task
from fedshift.errors import UserError, nearest
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.mixing import cross_domain_partners, mixed_styles
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.models.network import Network
from fedshift.weights import Weights


class MixStyle(DeepAll):
    """Pooled training with mixed feature statistics."""

    name: ClassVar[str] = "mixstyle"
    citation: ClassVar[str] = "Zhou et al., ICLR 2021"
    tasks: ClassVar[tuple[Task, ...]] = ("classification",)
    relative_cost: ClassVar[float] = 1.1

    probability: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="p: of mixing in a forward pass")
    alpha: PositiveFloat = Field(0.1, description="α of λ ~ Beta(α, α)")
    partners: Literal["random", "cross_domain"] = Field("random", description="whose style a sample is mixed with")
    stages: tuple[str, ...] | None = Field(
        None, description="behind which stages; none = all with positions but the last"
    )

    def check(self, network: Network) -> None:
        for stage in self.stages or ():
            if stage not in network.stages:
                raise UserError(
                    f"mixstyle.stages: the network has no stage '{stage}'; {nearest(stage, network.stages)}"
                )

    def check_samples(self, input_shape: tuple[int, ...]) -> tuple[str, ...]:
        if len(input_shape) != 3:
            raise UserError("mixstyle needs images: vectors have no statistics over positions; choose another method")
        return ()

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Where the pooled data lie: this round's share of the mini-batches."""
        model = site.model(weights)
        mixer = Mixer(self.probability, self.alpha, site.generator_for("mixstyle"), self.partners == "cross_domain")
        mixer.attach(model, self.stages)

        def loss_of(batch: Batch) -> Tensor:
            mixer.domains = batch.domains
            return F.cross_entropy(model(batch.inputs), batch.targets)

        loss = site.minimise(loss_of, model, steps=steps, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)


class Mixer:
    """Mixes the styles of a network's stages in training mode.

    Args:
        probability: p.
        alpha: α.
        draws: Draws whether to mix, λ and the partners.
        across: Whether a partner is of another domain; ``domains`` says which domain each sample is of.
    """

    def __init__(self, probability: float, alpha: float, draws: torch.Generator, across: bool) -> None:
        self.probability, self.alpha, self.draws, self.across = probability, alpha, draws, across
        self.domains: Tensor | None = None

    def attach(self, model: Network, stages: tuple[str, ...] | None) -> None:
        """Mix behind these stages of ``model``; None: behind all that have positions, except the last stage."""
        names = list(model.stages)[:-1] if stages is None else stages
        for name in names:
            model.get_submodule(model.stages[name]).register_forward_hook(self._mixed)

    def _mixed(self, module: torch.nn.Module, _: object, maps: Tensor) -> Tensor:
        if not module.training or maps.dim() != 4 or maps[0, 0].numel() < 2:
            return maps
        if torch.rand((), generator=self.draws) >= self.probability:
            return maps
        if self.across and self.domains is not None:
            order = cross_domain_partners(self.domains, self.draws)
        else:
            order = torch.randperm(len(maps), generator=self.draws).to(maps.device)
        return mixed_styles(maps, maps[order], beta(self.alpha, len(maps), self.draws).to(maps))


def beta(alpha: float, number: int, draws: torch.Generator) -> Tensor:
    """``number`` draws of Beta(α, α), (n,): the share of one of two Gamma(α) draws."""
    # Jöhnk: U^(1/α) and V^(1/α), accepted where their sum is at most one; in logarithms, since α is small.
    found = torch.empty(0)
    while len(found) < number:
        logs = torch.rand(2, 4 * number, generator=draws, dtype=torch.float64).log() / alpha
        total = torch.logaddexp(logs[0], logs[1])
        found = torch.cat([found, (logs[0] - total).exp()[total <= 0]])
    return found[:number]
