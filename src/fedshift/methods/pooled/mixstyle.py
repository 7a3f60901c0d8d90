"""MixStyle: the styles of feature maps are mixed between samples.

Zhou, Yang, Qiao, Xiang: Domain Generalization with MixStyle. ICLR 2021.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In training, with probability p in each forward pass, behind each of some stages of the network
    MixStyle(x) = γ_mix · (x − μ(x))/σ(x) + β_mix                                      (5)
    γ_mix = λσ(x) + (1−λ)σ(x̃),  β_mix = λμ(x) + (1−λ)μ(x̃),  λ ~ Beta(α, α)            (3, 4)
where x̃ is the batch in another order, μ and σ are a sample's mean and deviation per channel, held constant.

Where papers and code differ, and what was chosen. Code: ``KaiyangZhou/Dassl.pytorch``, dassl/modeling/ops/mixstyle.py,
MixStyle; its settings are in ``KaiyangZhou/mixstyle-release``, imcls/configs/trainers/mixstyle.
 1. ``partners: random``, the default, is a plain shuffle of a batch of all domains. ``cross_domain`` is the paper's
    "MixStyle w/ domain label" as the code has it: a batch is of two domains, half of each, drawn anew in each step, and
    a half's partners are the other half in a random order (pacs_crossdomain.yaml; there a batch is of 128, and 150
    epochs stand beside 50 with ``random``).
 2. The paper mixes behind residual blocks 1 to 3 for PACS and 1 to 2 for Office-Home. Default here: behind every stage
    that has positions, but the stem and the last stage of the network. For ResNet-18 these are blocks 1 to 3.
 3. Whether a pass is mixed, and λ and the partners, are drawn for each stage anew, as in the code.

Should reproduce: PACS ResNet-18 82.8 on average; with ``cross_domain`` 84.1, 78.8, 96.1, 75.9 (83.7).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError, nearest
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import Samples
from fedshift.methods.composition.mixstyle import Mixer
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.models.network import Network
from fedshift.weights import Weights


class MixStyle(DeepAll):
    """Pooled training with mixed feature statistics."""

    traits = DeepAll.traits.derive(
        name="mixstyle",
        citation="Zhou et al., ICLR 2021",
        group="pooled",
        advice="For convolutional networks, at no cost worth naming; no gain on PACS images (73.16, where deepall "
        "has 74.57).",
        tasks=WITHOUT_MASKS,
        unfit_plug_ins={"mixstyle": "which mixes styles by itself"},
        relative_cost=1.1,
    )

    probability: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="p: of mixing in a forward pass")
    alpha: PositiveFloat = Field(0.1, description="α of λ ~ Beta(α, α)")
    partners: Literal["random", "cross_domain"] = Field("random", description="whose style a sample is mixed with")
    stages: tuple[str, ...] | None = Field(
        None, description="behind which stages; none = all with positions but the stem and the last"
    )

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if self.partners == "cross_domain" and self.domain_batches is not None:
            raise ValueError("domain_batches: with partners: cross_domain a batch is of two domains; leave it out")
        return self

    def check(self, network: Network) -> None:
        for stage in self.stages or ():
            if stage not in network.stages:
                raise UserError(
                    f"mixstyle.stages: the network has no stage '{stage}'; {nearest(stage, network.stages)}"
                )

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        if len(samples.shape) != 3:
            raise UserError("mixstyle needs images: vectors have no statistics over positions; choose another method")
        return ()

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        across = self.partners == "cross_domain"
        batches = site.paired_batches(steps) if across else self.of_all(site, steps)
        Mixer(self.probability, self.alpha, site.generator_for("mixstyle"), across).attach(model, self.stages)

        def loss_of(batch: Batch) -> Tensor:
            return site.objective.loss(model(batch.inputs), batch.targets)

        loss = site.minimise_over(batches, loss_of, model, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)
