"""PARDON: every image also in one style that lies between those of all sites, with features that agree.

Nguyen, Johnson, Leach: PARDON: Privacy-Aware and Robust Federated Domain Generalization. ICDCS 2025. arXiv 2410.22622
(first as FISC).

Setting: domain generalization of images, as FedAvg. The target's style is not used.
Wire: once, one style of each site up, K·s, s bytes per style. Then FedAvg's, and in every round the common style down
to each site, K·s. No site gets the style of another. A site may refuse the kind ``styles``. With ``engine.on_refusal:
leave_out`` it then trains with the style of the others.

FINCH (Sarfraz et al., CVPR 2019) groups rows by their nearest neighbours in cosine, and the groups' means likewise.
 1. Style of site k: FINCH's last groups of its maps Φ(x); means over each group, then over the groups, of Φ and Φ²
      μ_k = mean over groups of E Φ,   σ_k = sqrt(mean over groups of E Φ² − μ_k² + 1e-5)
 2. Common style: FINCH's first groups of the sites' (μ_k, σ_k); of each a mean; (μ, σ) is their median, each number
    apart.
 3. Image x': Φ' = α·(σ·(Φ − μ(Φ))/σ(Φ) + μ) + (1 − α)·Φ, decoded
 4. With f and f' the features of x and x', ‖·‖ of features of length 1, and x'_n the other version of an image of
    another class, drawn:
      L = CE(C(f), y) + λ₁·max(0, ‖f − f'‖ − ‖f − f'_n‖ + ξ) + λ₂·mean(f² + f'²)

Where paper and code differ, and what was chosen. **The default differs from the paper in Φ.** The paper's is VGG-19 up
to relu4_1 with AdaIN's decoder, which needs the weights of both: ``setting: vgg``. By default Φ is what the first stage
of the network gives, with the styles of the common start and without a decoder. Others are the image's own channels
(``pixel``) and ``lab``.
 1. The paper could be read in part only. The equations are those of its code (``judydnguyen/PARDON-FedDG``,
    src/client.py, `DGClient`; src/server.py, `DGServer.find_optimal_metadata`; src/finch.py), with whose numbers steps
    1 to 4 agree.
 2. α = ½, ξ = 0.3, λ₁ = 0.75 and λ₂ = 0.2, as in its code for PACS (λ₂ = 0.1 for Office-Home, src/client.py,
    `contrastive_fit`).
 3. The code measures styles before the last ReLU of VGG, and applies them behind it (src/client.py,
    `abstract_style`). Here both are behind it. It reads normalised images, here they are between 0 and 1.
 4. A site measures its style of at most ``style_images`` images, all in the code (`DGClient`): FINCH compares each with
    each.
 5. The code (`contrastive_fit`) passes the images of a triplet through the network once more. Here each image passes
    once as it is and once in the common style, so that BatchNorm measures each of them once.
 6. Of an even number of groups the median is the lower one of two, as in the code (`torch.median`).
 7. Where no site sends a style, x' = x.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Styles, Update
from fedshift.federation.replies import About, Bounds
from fedshift.federation.site import Batch, Site
from fedshift.functional.clustering import class_means
from fedshift.functional.styles import EPSILON, adain
from fedshift.methods.base import Samples, State, trained_mean
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.composition.styles import Channels, SharedStyles, StylesOption
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.models.network import Network, changed_stages
from fedshift.weights import Weights

_EPSILON = 1e-7
_STYLE = "style"


class Pardon(FedAvg):
    """FedAvg on images that also stand in the common style."""

    traits = FedAvg.traits.derive(
        name="pardon",
        citation="Nguyen et al., ICDCS 2025",
        group="unseen",
        advice="For images whose sites differ in style. Each sends one style, once, which no other site gets.",
        sends="a model, and once **one style**",
        settings={"vgg": {"style_space": "vgg"}},
        tasks=("classification",),
        needs_classes="it contrasts features by their classes",
        averages={"fit_styled": Averaged()},
        server_reads="sums",
        relative_cost=2.0,
        tests=MethodTests(
            options={
                "stage": tries("conv2"),
                "style_images": tries(2),
                "strength": tries(0.0, 1.0),
                "contrast_weight": tries(0.0, 9.0),
                "margin": tries(0.05, 2.0),
                "norm_weight": tries(0.0, 2.0),
            },
            elsewhere={
                "style_space": ("lab", "vgg"),
                "vgg_encoder": ("another",),
                "vgg_decoder": ("another",),
                "vgg_size": ("another",),
            },
            rates=(0.01, 0.02),
        ),
    )

    style_space: Literal["feature", "pixel", "lab", "vgg"] = Field(
        "feature", description="Φ: a stage of the network, pixels, Lab, or VGG-19 (paper)"
    )
    stage: str | None = Field(None, description="stage of the network (style_space: feature); none = the first")
    vgg_encoder: Path = Field(
        Path("vgg19_normalised.safetensors"), description="VGG-19's weights, absolute or below FEDSHIFT_WEIGHTS"
    )
    vgg_decoder: Path = Field(Path("adain_decoder.safetensors"), description="the decoder's weights, likewise")
    vgg_size: PositiveInt = Field(224, description="pixels at which images are encoded (style_space: vgg)")
    style_images: PositiveInt = Field(256, description="most images of which a site measures its style")
    strength: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="α: share of the common style in an image")
    contrast_weight: NonNegativeFloat = Field(0.75, description="λ₁: weight of the triplets")
    margin: PositiveFloat = Field(0.3, description="ξ of the triplets")
    norm_weight: NonNegativeFloat = Field(0.2, description="λ₂: weight of the features' squares")

    @property
    def _option(self) -> StylesOption:
        """Φ, as ``prepare: styles`` has it."""
        return StylesOption(
            style_space=self.style_space,
            stage=self.stage,
            vgg_encoder=self.vgg_encoder,
            vgg_decoder=self.vgg_decoder,
            vgg_size=self.vgg_size,
            unbiased_content=True,
        )

    def check(self, network: Network) -> None:
        self._option.check_network(network)
        super().check(network)

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no styles")
        self._option.check_samples(samples.shape)
        return super().check_samples(samples)

    def bounds(self, call: str, about: About) -> Bounds:
        return self._option.bounds("share_styles", about) if call == "share_style" else {}

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        replies = federation.ask(self.share_style, to=federation.sources)
        styles = [reply.styles for _, reply in replies.items()]  # without a site that refuses
        return State(weights, parts={_STYLE: common_style(styles)} if styles else {})

    def round(self, federation: Federation, state: State) -> State:
        common = cast(Mapping[str, Styles], state.parts)
        updates = federation.ask(self.fit_styled, to=federation.sources, weights=state.weights, common=dict(common))
        weights, shares, losses = trained_mean(updates, by=self.weighting)
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares})

    # Source -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def share_style(self, site: Site) -> SharedStyles:
        """The site's one style: equal shares of groups of images that look alike."""
        rows = torch.randperm(site.samples, generator=site.generator_for("styles"))[: self.style_images].sort().values
        space = self._space(site)
        maps = torch.cat([space.encode(some).cpu() for some in self._option.samples(site, rows)])
        mean, deviation = style_of_groups(maps, first_neighbour_partitions(maps.flatten(1))[-1])
        return SharedStyles(Styles({"mean": mean[None], "deviation": deviation[None]}))

    def fit_styled(self, site: Site, weights: Weights, common: Mapping[str, Styles]) -> Update:
        """Train on images and their versions in the common style."""
        model = site.model(weights)
        return self._train_with(site, self.styled_loss(site, model, common.get(_STYLE)), model)

    def styled_loss(self, site: Site, model: Network, style: Styles | None) -> Callable[[Batch], Tensor]:
        """L of a mini-batch."""
        draws = site.generator_for("triplets")
        restyled = None if style is None else self._styled_features(site, model, style)

        def loss(batch: Batch) -> Tensor:
            features: Tensor = model.features(batch.inputs)
            styled = features if restyled is None else restyled(batch.inputs)
            total = F.cross_entropy(model.classifier(features), batch.targets)
            total = total + self.norm_weight * (features.square() + styled.square()).mean()
            others = rows_of_other_classes(batch.targets, draws).to(features.device)
            if not len(others):
                return total
            anchors, near = F.normalize(features), F.normalize(styled)
            contrast = F.triplet_margin_loss(anchors, near, near[others], margin=self.margin, eps=_EPSILON)
            return total + self.contrast_weight * contrast

        return loss

    def _space(self, site: Site) -> Channels:
        if "style space" not in site.scratch:
            site.scratch["style space"] = self._option.space(site)
        return cast(Channels, site.scratch["style space"])

    def _styled_features(self, site: Site, model: Network, style: Styles) -> Callable[[Tensor], Tensor]:
        """What gives the features of images in the common style."""
        mean, deviation = (style[name].to(site.device) for name in ("mean", "deviation"))

        def mix(maps: Tensor) -> Tensor:
            number = len(maps)
            new = adain(maps, mean.expand(number, -1), deviation.expand(number, -1), unbiased=True)
            return torch.lerp(maps, new, self.strength)

        if self.style_space == "feature":
            stage = self._option.stage_of(model)

            def in_network(inputs: Tensor) -> Tensor:
                with changed_stages(model, {stage: mix}):
                    features: Tensor = model.features(inputs)
                return features

            return in_network
        space = self._space(site)

        def in_images(inputs: Tensor) -> Tensor:
            pixels = site.pixels(inputs)
            changed = space.decode(mix(space.encode(pixels)), pixels).clamp(0, 1)
            features: Tensor = model.features(site.inputs_of(changed))
            return features

        return in_images


def common_style(styles: list[Styles]) -> Styles:
    """The median of the means of groups of sites' styles (1, c)."""
    rows = torch.cat([torch.cat([some["mean"], some["deviation"]], dim=1) for some in styles]).double()
    groups = first_neighbour_partitions(rows)[0]
    means, _ = class_means(rows, groups, int(groups.max()) + 1)
    mean, deviation = means.median(0).values.to(styles[0]["mean"])[None].chunk(2, dim=1)
    return Styles({"mean": mean, "deviation": deviation})


@torch.no_grad()
def first_neighbour_partitions(rows: Tensor) -> list[Tensor]:
    """FINCH: each row is in one group with the row whose cosine to it is the largest, then the groups' means likewise.

    It ends before all are one group, unless the rows themselves are, and where nothing is joined any more. Of equal
    cosines the first row counts. Source: Sarfraz, Sharma, Stiefelhagen (CVPR 2019, equation 1 and algorithm 1).
    """
    partitions: list[Tensor] = []
    groups, count = torch.arange(len(rows)), len(rows)
    while True:
        joined = _joined_to_neighbours(class_means(rows, groups.to(rows.device), count)[0].cpu())
        before, count = count, int(joined.max()) + 1
        if partitions and count in (1, before):
            return partitions
        groups = joined[groups]
        partitions.append(groups)
        if count == 1:
            return partitions


def _joined_to_neighbours(rows: Tensor) -> Tensor:
    """The group of each row, (n,), where rows hang together through their nearest others."""
    directions = F.normalize(rows)
    nearest = (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(1)
    groups = torch.arange(len(rows))
    while True:
        lowest = torch.minimum(groups, groups[nearest])
        lowest = lowest.scatter_reduce(0, nearest, lowest, "amin")
        if torch.equal(lowest, groups):
            numbers: Tensor = torch.unique(groups, return_inverse=True)[1]
            return numbers
        groups = lowest


def style_of_groups(maps: Tensor, groups: Tensor, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
    """One style of many images, in which each group of them counts the same.

    With means over all positions of a group's images, ``μ`` is the mean over groups of E x, and ``σ² + ε`` that of
    E x² less μ². Source: PARDON (Nguyen, Johnson, Leach, ICDCS 2025), judydnguyen/PARDON-FedDG, src/client.py,
    `DGClient.abstract_style`.
    """
    moments = torch.stack([maps.double().mean((2, 3)), maps.double().square().mean((2, 3))])  # (2, n, c)
    count = int(groups.max()) + 1
    sums = moments.new_zeros(2, count, maps.shape[1]).index_add_(1, groups, moments)
    mean, square = (sums / torch.bincount(groups, minlength=count)[:, None]).mean(1)
    return mean.to(maps), ((square - mean.square()).clamp(min=0) + epsilon).sqrt().to(maps)


def rows_of_other_classes(labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each sample, another one of another class, drawn among all of them."""
    others = (labels[:, None] != labels[None]).cpu()
    if not others.any():
        return torch.empty(0, dtype=torch.int64)
    return torch.multinomial(others.double(), 1, generator=generator)[:, 0]
