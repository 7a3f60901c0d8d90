"""FedCCRL: every image also in the styles of other sites and augmented, with features and predictions that agree.

Wang, Tang: FedCCRL: Federated Domain Generalization with Cross-Client Representation Learning. arXiv 2410.11267.

Setting: domain generalization, as FedAvg. The target's style is not used.
Wire: FedAvg's; and in every round the styles of r·N_k images of each site up, and all sites' styles down to each. A
site may refuse the kind ``styles``. With ``engine.on_refusal: leave_out`` it then trains with those of the others.

A style is an image's mean μ and deviation σ per channel. For two versions v of an image x, each with a style (μ', σ')
of another site, drawn anew, and λ ~ Beta(α, α):
    x_v = AugMix( (λσ + (1 − λ)σ')·(x − μ)/σ + λμ + (1 − λ)μ' )
With z the features, p the predicted probabilities, x_0 = x and p̄ = ⅓ Σ_v p_v:
    L = Σ_v CE(x_v, y) + λ₁·½ [C(z_1, z_0) + C(z_2, z_0)] + λ₂·⅓ Σ_v KL(p_v ‖ p̄)
    C: contrast of all features of two versions, mean over i of
       log Σ_(j ≠ i) exp(s_ij/τ) − mean over j of the class of i, i too, of s_ij/τ,   s the cosine

Where paper and code differ, and what was chosen
 1. The paper could be read in part only. The equations are those of its code (SanphouWang/FedCCRL,
    algorithm/client/fedccrl.py, `FedCCRLClient`; model/models.py, `MixStyle`), with whose numbers a step agrees.
 2. r = λ₁ = λ₂ = τ = 0.1 and α = 0.1, as in the code (algorithm/server/fedccrl.py, options). At least one style is
    sent.
 3. AugMix is torchvision's, as in the code (`FedCCRLClient.AugMixAugmentation`): a batch has one chain of operations,
    with shares for each image. The code makes bytes of images without clipping, so that what is too bright becomes
    dark. **Here they are clipped.**
 4. Styles are of pixels between 0 and 1, in the code of normalised images (`FedCCRLClient.compute_statistic`).
 5. Of a single site, or where all others refuse, images keep their own styles.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Styles, Update
from fedshift.federation.randomness import drawn_from
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.contrastive import supervised_contrast
from fedshift.functional.styles import adain, channel_styles
from fedshift.methods.base import RunPlan, Samples, State, Traffic, trained_mean
from fedshift.methods.composition.mixstyle import beta
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.models.network import Network
from fedshift.weights import Weights

EPSILON = 1e-6
VERSIONS = 2
_SEEDS = 2**62


@dataclass(frozen=True)
class SomeStyles(Reply):
    """Means and deviations of some of a site's images, by channel."""

    styles: Styles


class FedCCRL(LocalTraining):
    """FedAvg on images and two versions of each, in others' styles, that agree."""

    traits = LocalTraining.traits.derive(
        name="fedccrl",
        citation="Wang & Tang, arXiv 2024",
        group="unseen",
        advice="For images whose sites differ in brightness and colour; three passes a step, and styles of single "
        "images travel in every round.",
        sends="a model, and the styles of a tenth of the images",
        tasks=("classification",),
        needs_classes="it contrasts features by their classes",
        averages={"fit_beside": Averaged()},
        server_reads="sums",
        relative_cost=4.0,
        tests=MethodTests(
            options={
                "shared": tries(1.0),
                "contrast_weight": tries(0.0, 3.0),
                "agreement_weight": tries(0.0, 9.0),
                "temperature": tries(1.0, contrast_weight=3.0),
                "alpha": tries(5.0),
            },
            rates=(0.01, 0.02),
            golden={"augmix": False},  # bytes are cut, not rounded: the last bit of a float decides one
        ),
    )

    shared: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="r: part of the images whose styles are sent")
    contrast_weight: NonNegativeFloat = Field(0.1, description="λ₁: weight of the contrast of features")
    agreement_weight: NonNegativeFloat = Field(0.1, description="λ₂: weight of the agreement of predictions")
    temperature: PositiveFloat = Field(0.1, description="τ of the contrast")
    alpha: PositiveFloat = Field(0.1, description="α of λ ~ Beta(α, α)")
    augmix: bool = Field(True, description="whether AugMix follows the change of style")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.display, samples.shape, "vectors have no styles")
        if self.augmix and samples.shape[0] not in (1, 3):
            raise UserError(
                f"{self.name}.augmix: AugMix is for images of 1 or 3 channels, these have {samples.shape[0]}; set false"
            )
        return super().check_samples(samples)

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "share_styles":
            return {}
        shape = (self._number_shared(about.samples), about.input_shape[0])
        return {"styles": Tensors({"mean": shape, "deviation": shape}, low=0.0, high=1.01)}

    def traffic(self, plan: RunPlan) -> Traffic:
        more = sum(
            self._number_shared(number) - self._number_shared(plan.dry_samples[site])
            for site, number in plan.samples.items()
        )
        each = plan.rounds * more * 2 * 4 * plan.input_shape[0]
        return plan.dry + Traffic(up=each, down=each * len(plan.samples))

    def _number_shared(self, samples: int) -> int:
        """How many styles a site of so many samples sends."""
        return max(1, int(self.shared * samples))

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        replies = federation.ask(self.share_styles, to=federation.sources)
        bank = {site: reply.styles for site, reply in replies.items()}  # without a site that refuses
        updates = federation.ask_further(self.fit_beside, to=federation.sources, weights=state.weights, bank=bank)
        weights, shares, losses = trained_mean(updates)
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares})

    # Source -------------------------------------------------------------------------------------------------------

    def share_styles(self, site: Site) -> SomeStyles:
        """The styles of images that are drawn anew in each round."""
        rows = torch.randperm(site.samples, generator=site.generator_for("styles"))[: self._number_shared(site.samples)]
        means, deviations = channel_styles(site.pixels(site.data.batch(rows)[0]), EPSILON, unbiased=True)
        return SomeStyles(Styles({"mean": means.cpu(), "deviation": deviations.cpu()}))

    def fit_beside(self, site: Site, weights: Weights, bank: Mapping[str, Styles]) -> Update:
        """Train on images and their versions in the styles of other sites."""
        model = site.model(weights)
        return self._train_with(
            site, self.beside(site, model, [bank[name] for name in sorted(bank) if name != site.name]), model
        )

    def beside(self, site: Site, model: Network, others: list[Styles]) -> Callable[[Batch], Tensor]:
        """L of a mini-batch."""
        draws = site.generator_for("versions")
        bank = {name: torch.cat([styles[name] for styles in others]) for name in others[0]} if others else {}

        def loss(batch: Batch) -> Tensor:
            features = [model.features(batch.inputs)]
            for version in self._versions(site, batch.inputs, bank, draws):
                features.append(model.features(version))
            scores = [model.classifier(some) for some in features]
            total = torch.stack([F.cross_entropy(some, batch.targets) for some in scores]).sum()
            pairs, labels = (torch.cat([some, features[0]]) for some in features[1:]), batch.targets.repeat(2)
            contrast = sum(supervised_contrast(pair, labels, self.temperature) for pair in pairs) / VERSIONS
            apart = spread_of_predictions(scores)
            return total + self.contrast_weight * contrast + self.agreement_weight * apart

        return loss

    def _versions(
        self, site: Site, inputs: Tensor, bank: Mapping[str, Tensor], draws: torch.Generator
    ) -> Iterator[Tensor]:
        """x_1 and x_2."""
        for _ in range(VERSIONS):
            pixels = site.pixels(inputs)
            if bank:
                pixels = restyle(pixels, *self._draw_styles(bank, len(pixels), draws))
            if self.augmix:
                pixels = augmix(pixels, draws)
            yield site.inputs_of(pixels)

    def _draw_styles(
        self, bank: Mapping[str, Tensor], number: int, draws: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """μ', σ' and λ for so many images; styles come twice only where there are too few."""
        known = len(bank["mean"])
        rows = torch.randperm(known, generator=draws)[:number]
        if known < number:
            rows = torch.randint(known, (number,), generator=draws)
        return bank["mean"][rows], bank["deviation"][rows], beta(self.alpha, number, draws)


def restyle(images: Tensor, means: Tensor, deviations: Tensor, shares: Tensor) -> Tensor:
    """Images (n, c, h, w) with a style between their own, of which they keep ``shares`` (n,), and another (n, c)."""
    styles = channel_styles(images, EPSILON, unbiased=True)
    kept = shares[:, None].to(images)
    mean, deviation = (torch.lerp(new.to(old), old, kept) for new, old in zip((means, deviations), styles, strict=True))
    return adain(images, mean, deviation, EPSILON, unbiased=True)


def augmix(images: Tensor, draws: torch.Generator) -> Tensor:
    """AugMix of images with values from 0 to 1; others are clipped."""
    from torchvision.transforms import AugMix

    with drawn_from(int(torch.randint(_SEEDS, (), generator=draws))):  # torchvision draws from the global generator
        mixed: Tensor = AugMix()((images.clamp(0, 1) * 255).to(torch.uint8))
    return mixed.to(images) / 255


def spread_of_predictions(scores: Sequence[Tensor]) -> Tensor:
    """``1/V Σ_v KL(p_v ‖ p̄)`` with p̄ the mean of the p_v: the Jensen–Shannon divergence, the mean over rows, in nats.

    Source: AugMix (Hendrycks et al., ICLR 2020, equation 3), as FedCCRL has it. p̄ is at least 1e-7.
    """
    logs = torch.stack(list(scores)).log_softmax(2)  # of probabilities that round to 0, too
    each = logs.exp()
    return (each * (logs - each.mean(0).clamp(1e-7, 1).log())).sum(2).mean()
