"""StableFDG: maps in the styles of another site and beyond, and positions that look like the class.

Park, Han, Kim, Wang, Brinton, Moon: StableFDG: Style and Attention Based Learning for Federated Domain Generalization.
NeurIPS 2023.

Setting: domain generalization of images by a convolutional network. The target is never seen.
Wire: FedAvg's; and in every round 4·C numbers of each site up, and all sites' down to each, C the channels of the
network's first stage. A site may refuse the kind ``styles``. With ``engine.on_refusal: leave_out`` it then trains with
those of the others.

The style of a map is s = (μ, σ), its mean and deviation per channel. A map takes the style (μ', σ') by
σ'·(x − μ)/σ + μ'. A mini-batch of B images passes through the stages of the network:
 1. Sharing, behind the first stage, with probability p. B − ⌊B/2⌋ styles are centres of the mini-batch's own: k-means++
    and one pass of k-means. The others are drawn from N(m, d²), where m and d are mean and deviation of another site's
    styles. Every map takes one of them.
 2. Exploration, behind each stage but the last, with probability p. The first time B further maps are added, copies of
    those of the rarest classes, until the classes are equally frequent. Their styles go beyond the mean:
      s_new = s + α·(s − mean s)
    Then every map takes a style λs + (1 − λ)s', λ ~ Beta(0.1, 0.1), s' of another map.
 3. Attention, behind the last stage: with q and k (1×1 convolutions) of length 1 at each position, and q' of another
    image of the class (in prediction of the image itself), the classifier reads
      [ z, Σ_j a_j x_j ],   a = softmax_j  k_j · mean_i ½(q_i + q'_i)
    z the network's own features, which are the mean of x in a ResNet.

Where paper and code differ, and what was chosen
 1. The paper could be read in part only. The equations are those of its code (``savertm/StableFDG_github``: ops/
    style_insert.py, oma.py and cross_attn.py in dassl/modeling, engine/trainer.py), with whose numbers a step agrees.
 2. p = ½, α = 3, B maps are added (32 of 32 in the code), and q and k have 30 numbers, as in the code (oma.py, `OMA`;
    cross_attn.py, `AFH`).
 3. "Behind a stage" is behind one with a convolution. In a ResNet they are the four blocks.
 4. The code (engine/trainer.py, `TrainerX_fed`) draws further samples of a class that is once in a mini-batch, for
    Office-Home, as it says. **Here it is copied like others**, and is its own partner in the attention.
 5. The code (engine/trainer.py, `TrainerX_fed.style_collect`) deals the styles to the sites, from the second round on.
    Here a site draws one of the others' in every round. Of a single site, or where all others refuse, there is no
    sharing.
 6. A negative σ of sharing is 0, one of exploration stays, as in the code (ops/style_insert.py, `style_insert`). Where
    q or k is zero, the code divides by zero. Here its share is that of no likeness.
 7. All sites have the same weight in the code (engine/trainer.py, `TrainerX_fed`): ``weighting: uniform``. k-means++
    draws one centre at a time.

Should reproduce: no table of this setting with our splits is known to us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Styles, Update
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.clustering import kmeans_from, squared_distances
from fedshift.functional.styles import adain, channel_styles
from fedshift.methods.base import Samples, State, trained_mean
from fedshift.methods.composition.mixstyle import STEM, beta, shuffle_rows
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.models.network import Network, map_channels
from fedshift.weights import Weights

EPSILON = 1e-6
Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class StylesOfSite(Reply):
    """Mean and deviation of the styles of a site's images behind the first stage, (2, C) each: of μ and of σ."""

    styles: Styles


class Highlighted(nn.Module):
    """Features (n, d) beside the maps' sum over positions, weighted by attention: (n, d + C).

    ``stage``: path in it of what gives the maps.
    """

    def __init__(self, backbone: nn.Module, stage: str, channels: int, size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.stage = stage
        self.project = nn.Conv2d(channels, 2 * size, kernel_size=1)
        nn.init.kaiming_normal_(self.project.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(cast(Tensor, self.project.bias))

    def parts(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, d) and maps (n, C, h, w)."""
        maps: list[Tensor] = []
        handle = self.backbone.get_submodule(self.stage).register_forward_hook(lambda *given: maps.append(given[2]))
        try:
            features = self.backbone(inputs)
        finally:
            handle.remove()
        return features, maps[0]

    def join(self, features: Tensor, maps: Tensor, partners: Tensor | None = None) -> Tensor:
        """What the classifier reads, (n, d + C)."""
        queries, keys = self.project(maps).chunk(2, dim=1)
        shares = common_positions(queries, keys, partners)
        return torch.cat([features, (maps * shares[:, None]).sum((2, 3))], dim=1)

    def forward(self, inputs: Tensor) -> Tensor:
        features, maps = self.parts(inputs)
        return self.join(features, maps)


class StableFDG(FedAvg):
    """FedAvg of a network with attention, whose maps take the styles of another site and go beyond."""

    traits = FedAvg.traits.derive(
        name="stablefdg",
        citation="Park et al., NeurIPS 2023",
        group="unseen",
        advice="For images and convolutional networks, where sites differ in style; of styles only means leave a site.",
        sends="a model, and mean and deviation of its styles",
        small={"attention_size": 4},
        tasks=("classification",),
        needs_classes="it repeats samples of the rarest classes",
        averages={"fit_styled": Averaged()},
        server_reads="sums",
        relative_cost=2.5,
        tests=MethodTests(
            options={
                "sharing": tries(0.0, 1.0),
                "exploring": tries(0.0, 1.0),
                "exploration": tries(0.0, exploring=1.0),
                "added": tries(0.0, 2.5, exploring=1.0),
                "mixing": tries(5.0, exploring=1.0),
                "attention_size": tries(2),
            },
        ),
    )

    sharing: Probability = Field(0.5, description="p of sharing in a mini-batch; 0 = no style leaves a site")
    exploring: Probability = Field(0.5, description="p of exploration behind a stage")
    exploration: NonNegativeFloat = Field(3.0, description="α: how far styles go beyond their mean")
    added: NonNegativeFloat = Field(1.0, description="maps that are added, in sizes of a mini-batch")
    mixing: PositiveFloat = Field(0.1, description="of λ ~ Beta, the share of a map's own style")
    attention_size: PositiveInt = Field(30, description="numbers of a query and of a key")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no styles")
        return super().check_samples(samples)

    def adapt_network(self, network: Network, sources: int) -> Network:
        channels = _stages(network)
        last, width = list(channels)[-1], network.embedding_size + channels[list(channels)[-1]]
        path = network.stages[last].removeprefix("features.")
        with drawn_from(derive_seed(network.seed, "block", "highlighted")):
            features = Highlighted(network.features, path, channels[last], self.attention_size)
            classifier = nn.Linear(width, network.classes)
        return network.with_parts(features, classifier, embedding_size=width, moved_to="backbone")

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "share_styles":
            return {}
        shape = (2, next(iter(_stages(about.network).values())))
        return {"styles": Tensors({"mean": shape, "deviation": shape})}

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        bank: dict[str, Styles] = {}
        if self.sharing > 0:
            replies = federation.ask(self.share_styles, to=federation.sources, weights=state.weights)
            bank = {site: reply.styles for site, reply in replies.items()}  # without a site that refuses
        updates = federation.ask_further(self.fit_styled, to=federation.sources, weights=state.weights, bank=bank)
        weights, shares, losses = trained_mean(updates, by=self.weighting)
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares})

    # Source -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def share_styles(self, site: Site, weights: Weights) -> StylesOfSite:
        """m and d of the site's styles, of the common model."""
        model = site.model(weights).eval()
        first = next(iter(_stages(model)))
        maps = (model.with_stages(batch.inputs, (first,))[1][first] for batch in site.all_batches())
        styles = torch.cat([torch.stack(channel_styles(some, EPSILON, unbiased=True), 1) for some in maps])
        variance = styles.var(0, correction=min(1, len(styles) - 1))
        content = {"mean": styles.mean(0), "deviation": (variance + EPSILON).sqrt()}
        return StylesOfSite(Styles({name: value.cpu() for name, value in content.items()}))

    def fit_styled(self, site: Site, weights: Weights, bank: Mapping[str, Styles]) -> Update:
        """Train on maps in other styles."""
        model, others = site.model(weights), sorted(set(bank) - {site.name})
        drawn = torch.randint(max(1, len(others)), (), generator=site.generator_for("other"))
        return self._train_with(site, self.styled_loss(site, model, bank[others[drawn]] if others else None), model)

    def styled_loss(self, site: Site, model: Network, other: Styles | None) -> Callable[[Batch], Tensor]:
        """The loss of a mini-batch and of the maps that are added to it."""
        draws = site.generator_for("styles")
        features = cast(Highlighted, model.features)

        def loss(batch: Batch) -> Tensor:
            with Styled(self, draws, batch.targets, other).attach(model) as styled:
                plain, maps = features.parts(batch.inputs)
            codes = features.join(plain, maps, next_of_class(styled.labels))
            return site.objective.loss(model.classifier(codes), styled.labels)

        return loss


class Styled:
    """Sharing and exploration of one mini-batch on its way through the stages.

    ``labels``: of the mini-batch, (n,); afterwards also those of the maps that were added. ``other``: m and d of
    another site; None: no sharing.
    """

    def __init__(self, options: StableFDG, draws: torch.Generator, labels: Tensor, other: Styles | None) -> None:
        self.options, self.draws, self.labels, self.other = options, draws, labels, other
        self._size = len(labels)

    @contextmanager
    def attach(self, model: Network) -> Iterator[Styled]:
        """A context in which the stages of ``model`` give other maps."""
        stages = [model.get_submodule(model.stages[name]) for name in list(_stages(model))[:-1]]
        with ExitStack() as attached:
            hooks = [(stages[0], self.share), *((stage, self.explore) for stage in stages)]
            for stage, change in hooks:
                handle = stage.register_forward_hook(lambda _module, _inputs, maps, change=change: change(maps))
                attached.callback(handle.remove)
            yield self

    def _happens(self, probability: float) -> bool:
        return bool(torch.rand((), generator=self.draws) < probability)

    def share(self, maps: Tensor) -> Tensor:
        """Maps (n, c, h, w) in styles of this site's and of the other's."""
        if self.other is None or not self._happens(self.options.sharing):
            return maps
        fixed = maps.detach()
        styles = torch.stack(channel_styles(fixed, EPSILON, unbiased=True), 1).flatten(1)  # (n, 2c)
        new = torch.cat([self._centres(styles), self._draw_styles(len(styles) // 2).to(styles)])
        means, deviations = new.chunk(2, dim=1)
        centre, spread = styles.chunk(2, dim=1)
        scale = (deviations / spread)[:, :, None, None]
        return maps * scale + (means - centre * scale[:, :, 0, 0])[:, :, None, None]

    def _centres(self, styles: Tensor) -> Tensor:
        start = styles[spread_rows(styles, len(styles) - len(styles) // 2, self.draws)]
        groups, centres = kmeans_from(styles, start, passes=1)
        empty = torch.bincount(groups, minlength=len(start)) == 0
        return torch.where(empty[:, None], start, centres)

    def _draw_styles(self, number: int) -> Tensor:
        """So many styles (number, 2c) of the other site."""
        assert self.other is not None
        mean, deviation = self.other["mean"], self.other["deviation"]
        drawn = mean + deviation * torch.randn(number, *mean.shape, generator=self.draws)
        return torch.stack([drawn[:, 0], drawn[:, 1].clamp(min=0)], 1).flatten(1)

    def explore(self, maps: Tensor) -> Tensor:
        """Maps (n, c, h, w), with others the first time, in styles mixed with each other's."""
        if not self._happens(self.options.exploring):
            return maps
        means, deviations = (style.detach() for style in channel_styles(maps, EPSILON, unbiased=True))
        if len(maps) == self._size:
            rows = levelling_rows(self.labels, round(self.options.added * self._size), self.draws).to(maps.device)
            maps, self.labels = torch.cat([maps, maps[rows]]), torch.cat([self.labels, self.labels[rows]])
            means, deviations = (
                torch.cat([style, style[rows] + self.options.exploration * (style[rows] - style.mean(0))])
                for style in (means, deviations)
            )
        order = shuffle_rows(len(maps), self.draws).to(maps.device)
        shares = beta(self.options.mixing, len(maps), self.draws).to(maps)[:, None]
        mean, deviation = (torch.lerp(style[order], style, shares) for style in (means, deviations))
        return adain(maps, mean, deviation, EPSILON, unbiased=True)


def _stages(network: Network) -> dict[str, int]:
    """The stages whose maps are changed or attended to, and their channels.

    Raises UserError: there are fewer than two.
    """
    channels = {name: number for name, number in map_channels(network).items() if name != STEM}
    if len(channels) < 2:
        raise UserError(
            "stablefdg needs two stages of maps, and the network has fewer with a convolution: choose one such as "
            "mnist_cnn or resnet18"
        )
    return channels


_SHORT = 1e-6


def common_positions(queries: Tensor, keys: Tensor, partners: Tensor | None = None) -> Tensor:
    """How much of an image lies at each position, by what it has in common with an image of its class.

    ``a = softmax_j  k̂_j · mean_i ½(q̂_i + q̂'_i)``, q̂ and k̂ queries and keys of length 1, q̂' those of the partner. One
    that is shorter than 1e-6 is taken for zero and a constant, since its direction would have any gradient.

    Source: StableFDG (Park et al., NeurIPS 2023), the authors' code: savertm/StableFDG_github, dassl/modeling/ops/
    cross_attn.py, AFH. It forms all products of two positions, whose mean is the product with a mean.
    """
    mean = _directions(queries).mean((2, 3))
    both = mean if partners is None else (mean + mean[partners]) / 2
    scores = torch.einsum("nc,nchw->nhw", both, _directions(keys))
    return scores.flatten(1).softmax(1).view_as(scores)


def _directions(maps: Tensor) -> Tensor:
    """Vectors (n, c, h, w) of length 1 at every position, or 0."""
    lengths = torch.linalg.vector_norm(maps, dim=1, keepdim=True)
    return torch.where(lengths > _SHORT, maps / lengths.clamp(min=_SHORT), 0)


@torch.no_grad()
def spread_rows(rows: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Rows that lie far from each other, drawn by k-means++: each with the square of its distance to those before it.

    Source: Arthur, Vassilvitskii (SODA 2007, section 2.2). Of equal rows alone, any is drawn.
    """
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    nearest = torch.full((len(rows),), torch.inf)
    while len(chosen) < number:
        nearest = torch.minimum(nearest, squared_distances(rows, rows[chosen[-1:]])[:, 0].cpu().clamp(min=0))
        nearest[chosen[-1]] = 0
        shares = nearest if nearest.any() else torch.ones_like(nearest)
        chosen.append(int(torch.multinomial(shares, 1, generator=generator)))
    return torch.tensor(chosen)


def next_of_class(labels: Tensor) -> Tensor:
    """The next sample of each sample's class, after the last the first; a class's only sample is its own."""
    after = torch.arange(len(labels), device=labels.device)
    gaps = (after[None] - after[:, None] - 1).remainder(len(labels))  # 0 for the next row, n − 1 for the row itself
    return gaps.masked_fill(labels[None] != labels[:, None], len(labels)).argmin(1)


def levelling_rows(labels: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Rows to repeat, so that the classes of a batch become equally frequent: each time one of a rarest class.

    Source: StableFDG (Park et al., NeurIPS 2023), the authors' code: dassl/modeling/ops/oma.py, OMA.
    """
    _, classes, counts = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    frequent, rows = counts.clone(), []
    for _ in range(number):
        rarest = (frequent == frequent.min()).nonzero()[:, 0]
        chosen = rarest[torch.randint(len(rarest), (), generator=generator)]
        frequent[chosen] += 1
        members = (classes == chosen).nonzero()[:, 0]
        rows.append(members[torch.randint(len(members), (), generator=generator)])
    return torch.stack(rows) if rows else torch.empty(0, dtype=torch.int64)
