"""FedDG-ELCFS: episodic learning in continuous frequency space.

Liu, Chen, Qin, Dou, Heng: FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic Learning in
Continuous Frequency Space. CVPR 2021.

Setting: domain generalization, for segmentation and for classification; the target is never seen.
Wire: once, the amplitudes of every site's images go to all other sites (the bank); per round 2·K·S(θ) and N_k. Only the
low-frequency window is used, so only it is sent: (2b + 1)·(b + 1) numbers of 4 bytes per image and channel instead of
H·W. It still is information about single images: kind ``spectra``, which a site may refuse. With ``engine.on_refusal:
leave_out`` such a site still trains: it receives the spectra of the others and sends none.

With amplitude A_i and phase P_i of a site's own image, A_j of another site's image, mask M on the square of side 2b + 1
around frequency zero, b = ⌊L·min(H, W)⌋, and λ drawn for every image:
    t = F⁻¹( A_i(1−M) + [(1−λ)A_i + λA_j]M,  P_i ),  cut to the range of pixels          continuous frequency space
    θ̂ = θ − β ∇_θ L(x; θ)                                                                  meta-train, the site's look
    min_θ  L(x; θ) + L(t; θ̂) + γ L_boundary(x, t; θ̂)                                        meta-test, other sites' look
    θ ← Σ_k (N_k/ΣN) θ_k
L is cross-entropy, or the Dice loss for segmentation. Only segmentation has the boundary term, which contrasts contours
with their surroundings in the last feature map.

Where the paper and its code differ. The defaults are the paper's; ``setting: released`` is the authors' code
(liuquande/FedDG-ELCFS, train_ELCFS.py, main loop, unless another file is named), ``ccst_port`` the port in CCST's code
(JeremyCJM/CCST, federated/fed_run.py, `train_meta`), ``light`` the paper with the code's cheaper episode (1 and 2).
 1. The paper has K − 1 transformed copies of an image, the code one; ``light`` draws the other site for each image.
    The loss of all copies is one mean (``copies``).
 2. The paper's objective depends on θ through θ̂ as well, which is a gradient through the inner step. The code takes no
    second derivatives and clips the inner gradient's entries at ±100, which the paper does not mention. The gradient of
    L(x; θ) is then used for both steps, and a mini-batch is two passes forward and backward. The port clips at ±1 and
    evaluates L(t; θ̂) on a copy of the model, so that it changes nothing (``meta_gradient``, ``clip``).
 3. L = 0.01 in the paper; 0 in the code's training loader (dataloaders/fundus_dataloader.py, `Dataset.__getitem__`) and
    in the port, which exchanges the mean intensity alone (``window``). Where the paper's L is less than one frequency,
    b = 1 is taken, with a warning.
 4. λ ~ U(0, 1) in the paper; the code replaces the own amplitude by the foreign one (λ = 1:
    dataloaders/fundus_dataloader.py, `low_freq_mutate_np`); the port draws from {0.1, …, 0.9}; the code's demonstration
    (freq_space_interpolation_demo.py) from {0.2, 0.4, …, 1} (``rates``).
 5. The code rounds shares to two decimals; the port has equal shares (``weighting``). The code shares the spectra of an
    eighth of a site's images (``bank_share``).
    It adds the boundary terms of the structures, here their mean is taken; and it takes the features of the own images
    at θ, where the paper takes all of them at θ̂ (train_ELCFS.py, main loop; ``boundary``).
No setting changes these:
 6. The printed formula would drop the low band at λ = 0. Here, as in every implementation: the form above.
 7. The code averages no buffers (its network has none: networks/unet2d.py, Unet2D, InstanceNorm). Here BatchNorm's
    statistics are averaged like weights. A mini-batch moves them twice: by its images at θ and by the copies at θ̂. In
    the port it moves them once, by its images, since the port asks a copy of the model for L(t; θ̂)
    (JeremyCJM/CCST, federated/fed_run.py, train_meta); so it is with ``meta_gradient: none``.
 8. The threshold of 0.75 and the largest component belong to the model (``unet``), so that all methods share them.
 9. A volume's spectrum has three axes and its window is a cube, (2b + 1)²·(b + 1) numbers; contours and surroundings
    have six neighbours. The paper trains on slices.
10. The code keeps optimisers over rounds: ``training.reset_optimizer_each_round: false``. Foreign amplitudes are those
    of images without augmentation. The rows that CSAC prints have no boundary term, nor has classification here.

Should reproduce: Rotated MNIST average 88.60 ± 0.30, PACS ResNet-18 82.15 ± 0.35 (as printed by CSAC).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from fedshift.data.domain import ALL_TASKS
from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Between, PerSite, Reply, Spectra, Update
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.meta_learning import answer_at, inner_step, with_gradient
from fedshift.functional.spectra import half_width, interpolate_amplitudes, low_frequencies
from fedshift.methods.base import Method, RunPlan, Samples, State, Traffic, trained_mean
from fedshift.methods.index import Reads
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights

_LAWS = {"released": (1.0,), "ccst": tuple(n / 10 for n in range(1, 10)), "demo": tuple(n / 5 for n in range(1, 6))}
"""The values of λ where it is not uniform, with equal probabilities."""
_COST = {(False, "one"): 2.1, (False, "all"): 6.0, (True, "one"): 4.7, (True, "all"): 8.0}
"""(gradient through the inner step, copies) → relative cost, between those of a small CNN and a ResNet-18 at 64 px."""


@dataclass(frozen=True)
class SharedSpectra(Reply):
    """The windows of a site's amplitudes, (n, c, 2b + 1, b + 1), and the size of its images."""

    spectra: Spectra
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class Received(Reply):
    """An empty reply: the bank has arrived."""


class ELCFS(Method):
    """Meta-learning: a gradient step on own images should also help on the same images in another site's style."""

    traits = Traits(
        name="elcfs",
        citation="Liu et al., CVPR 2021",
        group="unseen",
        advice="For images that differ in colour and contrast; no gain over FedAvg is shown over targets: +14.05 "
        "Dice on generated fundus images, nearly all at one camera (p = 0.305), +0.46 on Rotated MNIST (p "
        "= 1.000). Spectra of single images leave the sites.",
        sends="a model, and once **low-frequency amplitudes of single images**",
        settings={
            "released": {
                "window": 0.0,
                "rates": "released",
                "copies": "one",
                "bank_share": 0.125,
                "clip": 100.0,
                "meta_gradient": "first",
                "boundary": "released",
                "weighting": "rounded",
            },
            "ccst_port": {
                "window": 0.0,
                "rates": "ccst",
                "copies": "one",
                "clip": 1.0,
                "meta_gradient": "none",
                "weighting": "uniform",
            },
            "light": {"copies": "one", "clip": 100.0, "meta_gradient": "first"},
        },
        tasks=ALL_TASKS,
        memory_names=("optimizer", "bank"),
        averages={"fit": Averaged()},
        server_reads="sums",
        own_gradients=True,
        tests=MethodTests(
            beside={"window": 0.2, "inner_rate": 0.5},
            options={
                "window": tries(0.0, 0.3),
                "bank_share": tries(0.125),
                "inner_rate": tries(0.1, 0.0),
                "clip": tries(0.001),
                "boundary_weight": tries(0.0, 1.0, where="masks"),
                "boundary": tries("released", where="masks"),
                "temperature": tries(0.5, where="masks"),
            },
            golden={"setting": "light"},
            rates=(0.005, 0.0),
        ),
    )

    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")
    window: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.01, description="L: half-width of the exchanged window as a share of the image; 0 = mean intensity (released)"
    )
    rates: Literal["uniform", "released", "ccst", "demo"] = Field(
        "uniform",
        description="distribution of λ: U(0, 1) (paper), 1 (released code), tenths to 0.9 (CCST's port), fifths to 1",
    )
    copies: Literal["one", "all"] = Field("all", description="transformed copies of an image: 1 (code) or K−1 (paper)")
    bank_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of each site's images whose spectra are shared (released code: 0.125)"
    )
    inner_rate: NonNegativeFloat = Field(1e-3, description="β: learning rate of the inner step")
    clip: PositiveFloat | None = Field(
        None, description="largest entry of the inner gradient (code: 100, CCST's port: 1); none = not clipped"
    )
    meta_gradient: Literal["first", "second", "none"] = Field(
        "second", description="of L(t; θ̂) by θ: through the inner step, first order (code), or none (CCST's port)"
    )
    boundary_weight: NonNegativeFloat = Field(0.1, description="γ: weight of the boundary term (segmentation)")
    boundary: Literal["paper", "released"] = Field(
        "paper",
        description="all features at θ̂ and the mean over structures, or own images' at θ and the sum (segmentation)",
    )
    temperature: PositiveFloat = Field(0.05, description="τ of the boundary term's contrast (segmentation)")
    weighting: Literal["samples", "rounded", "uniform"] = Field(
        "samples", description="shares N_k/ΣN (paper), rounded to two decimals (code), or 1/K"
    )

    def adjust_traits(self, traits: Traits) -> Traits:
        """The cost with four other sites. Rounded shares are made of every site's N_k."""
        cost = _COST[self.meta_gradient == "second", self.copies]
        reads: Reads = "norms" if self.weighting == "rounded" else "sums"
        return replace(traits, relative_cost=cost, server_reads=reads)

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def traffic(self, plan: RunPlan) -> Traffic:
        channels, *sides = plan.input_shape
        each = 4 * channels * math.prod(_window_shape(self._half_width(*sides), len(sides)))
        more = sum(
            self._number_shared(number) - self._number_shared(plan.dry_samples[site])
            for site, number in plan.samples.items()
        )
        return plan.dry + Traffic(up=more * each, down=(len(plan.samples) - 1) * more * each)

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        if len(samples.shape) not in (3, 4):
            raise UserError(
                f"{self.display} exchanges spectra of images, but the samples are not images: choose another method"
            )
        smallest = min(samples.shape[1:])
        if samples.parts:
            raise UserError(f"{self.display} exchanges spectra of whole volumes, not of parts: leave out data.patch")
        if len(samples.shape) == 4 and not samples.are_pixels:
            raise UserError(f"{self.display} needs volumes of values from black to white: store them as uint8")
        if self.window == 0 or half_width(self.window, *samples.shape[1:]) > 0:
            return ()
        return (
            f"{self.display}.window: {self.window:g} of {smallest} pixels is less than one frequency, so a window of "
            f"3×3 is exchanged; write {1 / smallest:.2g} to say so, or 0 to exchange the mean intensity alone",
        )

    def _half_width(self, *sides: int) -> int:
        """b, at least 1 unless ``window`` is 0."""
        if self.window == 0 or min(sides) < 3:
            return 0
        return max(1, half_width(self.window, *sides))

    def _number_shared(self, samples: int) -> int:
        """The number of a site's images whose spectra are shared."""
        return max(1, round(self.bank_share * samples))

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "share_spectra":
            return {}
        channels, *sides = about.input_shape
        shape = (self._number_shared(about.samples), channels, *_window_shape(self._half_width(*sides), len(sides)))
        sizes = {"channels": channels, "height": sides[-2], "width": sides[-1]}
        # An amplitude is at most the sum of all pixels, which are at most 1; its last digits may be rounded up.
        return {
            "spectra": Tensors({"amplitude": shape}, low=0, high=1.001 * math.prod(sides)),
            **{name: Between(size, size) for name, size in sizes.items()},
        }

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        """Send every site's spectra to all other sites. A site that refuses to share its own receives the others'."""
        replies = dict(federation.ask(self.share_spectra, to=federation.sources).items())
        bank = {
            site: {other: replies[other].spectra for other in sorted(replies) if other != site}
            for site in federation.sources
        }
        federation.ask(self.receive, to=federation.sources, bank=PerSite(bank)).drain()
        return State(weights)

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        by: str | Mapping[str, float] = self.weighting
        if self.weighting == "rounded":  # needs every N_k first
            by = rounded_shares({site: int(number) for site, number in updates.keep().numbers("samples").items()})
        weights, shares, losses = trained_mean(updates, by=by)
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares})

    # Site ---------------------------------------------------------------------------------------------------------

    def share_spectra(self, site: Site) -> SharedSpectra:
        """The low-frequency amplitudes of the site's images, or of a share of them drawn at random."""
        channels, *sides = site.data.input_shape
        half, axes = self._half_width(*sides), len(sides)
        windows = torch.cat(
            [low_frequencies(site.pixels(batch.inputs), half, axes).cpu().contiguous() for batch in site.all_batches()]
        )
        number = self._number_shared(len(windows))
        if number < len(windows):
            windows = windows[torch.randperm(len(windows), generator=site.generator)[:number].sort().values]
        return SharedSpectra(Spectra({"amplitude": windows}), channels, *sides[-2:])

    def receive(self, site: Site, bank: Mapping[str, Spectra]) -> Received:
        """Keep the other sites' spectra for the whole run."""
        site.memory["bank"] = bank
        return Received()

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train for E epochs of episodes."""
        model = site.model(weights)
        parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        foreign = _Bank(self, site)
        second = self.meta_gradient == "second"

        def loss_of(batch: Batch) -> Tensor:
            maps = model.features(batch.inputs) if self._contrasts_maps_at_start(batch) else None
            logits = model(batch.inputs) if maps is None else model.classifier(maps)
            loss = site.objective.loss(logits, batch.targets)
            gradients = torch.autograd.grad(
                loss,
                list(parameters.values()),
                create_graph=second,
                retain_graph=second or maps is not None,
                materialize_grads=True,
            )
            ahead = inner_step(parameters, gradients, self.inner_rate, self.clip, second_order=second)
            meta = self._meta_loss(site, model, ahead, batch, foreign.copies(batch.inputs), maps)
            if self.meta_gradient == "none":
                meta = meta.detach()
            # At first order, the gradient that made θ̂ is the whole gradient of this loss, so it is used again.
            return (loss if second else with_gradient(loss, list(parameters.values()), gradients)) + meta

        loss = site.minimise(loss_of, model, epochs=self.local_epochs, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)

    def _contrasts_maps_at_start(self, batch: Batch) -> bool:
        """Whether the boundary term takes the features of the site's own images at θ."""
        return self.boundary == "released" and batch.targets.dim() >= 4 and self.boundary_weight > 0

    def _meta_loss(
        self,
        site: Site,
        model: Network,
        ahead: Mapping[str, Tensor],
        batch: Batch,
        copies: Tensor,
        maps_at_start: Tensor | None = None,
    ) -> Tensor:
        """L(t; θ̂), and for segmentation γ·L_boundary(x, t; θ̂).

        ``maps_at_start``: features of x at θ, (b, F, h, w), if the boundary term takes them instead of those at θ̂.
        """
        targets = batch.targets.repeat(len(copies) // len(batch.inputs), *[1] * (batch.targets.dim() - 1))
        if targets.dim() < 4 or self.boundary_weight == 0:
            return site.objective.loss(self._answer(model, ahead, copies), targets)
        number = len(batch.inputs)
        inputs = torch.cat([batch.inputs, copies]) if maps_at_start is None else copies
        maps = self._answer(model, ahead, inputs, part="features")
        maps = maps if maps_at_start is None else torch.cat([maps_at_start, maps])
        scores = self._answer(model, ahead, maps[number:], part="classifier")
        masks, added = torch.cat([batch.targets, targets]), maps_at_start is not None
        boundary = boundary_loss(maps, masks, self.temperature, added=added)
        return site.objective.loss(scores, targets) + self.boundary_weight * boundary

    def _answer(self, model: Network, ahead: Mapping[str, Tensor], inputs: Tensor, part: str | None = None) -> Tensor:
        """The answer at θ̂. BatchNorm's statistics follow it, but in the port, which asks a copy of the model."""
        answer: Tensor = answer_at(model, ahead, inputs, part=part, counts=self.meta_gradient != "none")
        return answer


def _window_shape(half: int, axes: int) -> tuple[int, ...]:
    """The shape of the window of an image, or of a volume."""
    return (*[2 * half + 1] * (axes - 1), half + 1)


class _Bank:
    """The other sites' spectra at a site, and images with these amplitudes."""

    def __init__(self, method: ELCFS, site: Site) -> None:
        self.method, self.site = method, site
        held = cast(Mapping[str, Spectra], site.memory.get("bank", {}))
        windows = [held[name]["amplitude"] for name in sorted(held)]
        self.sizes = torch.tensor([len(window) for window in windows])
        self.first = self.sizes.cumsum(0) - self.sizes
        self.windows = torch.cat(windows).to(site.device) if windows else None
        self.draws = site.generator_for("donors")

    def copies(self, inputs: Tensor) -> Tensor:
        """Inputs (b, …) with foreign amplitudes: (b, …), or ((K−1)·b, …) with a copy for every other site.

        If there are no foreign spectra, the inputs themselves.
        """
        if self.windows is None:
            return inputs
        number, sites = len(inputs), len(self.sizes)
        if self.method.copies == "all":
            donors = torch.arange(sites).repeat_interleave(number)
        else:
            donors = torch.randint(sites, (number,), generator=self.draws)
        within = (torch.rand(len(donors), generator=self.draws) * self.sizes[donors]).long()
        rows = self.first[donors] + torch.minimum(within, self.sizes[donors] - 1)
        pixels = self.site.pixels(inputs)
        if len(donors) > number:
            pixels = pixels.repeat(sites, *[1] * (pixels.dim() - 1))
        rates = self._rates(len(donors)).view(-1, *[1] * (pixels.dim() - 1)).to(pixels.device)
        half = (self.windows.shape[-2] - 1) // 2
        mixed = interpolate_amplitudes(pixels, self.windows[rows.to(pixels.device)], rates, half, pixels.dim() - 2)
        return self.site.inputs_of(mixed.clamp_(0, 1))

    def _rates(self, number: int) -> Tensor:
        """λ of each image."""
        if self.method.rates == "uniform":
            return torch.rand(number, generator=self.draws)
        law = torch.tensor(_LAWS[self.method.rates])
        return law[torch.randint(len(law), (number,), generator=self.draws)]


RING = 5
"""Steps of dilation that make the surroundings of a structure (ELCFS)."""


def dilate(masks: Tensor, steps: int = 1) -> Tensor:
    """Grow masks to their four neighbours, in volumes six. Outside the image everything is empty."""
    axes = masks.dim() - 2
    pool = functional.max_pool2d if axes == 2 else functional.max_pool3d
    along = [tuple(3 if axis == other else 1 for other in range(axes)) for axis in range(axes)]
    for _ in range(steps):
        grown = [pool(masks, size, 1, tuple(side // 2 for side in size)) for size in along]
        masks = functools.reduce(torch.maximum, grown)
    return masks


def erode(masks: Tensor, steps: int = 1) -> Tensor:
    """Shrink masks from their four neighbours, in volumes six. Outside the image everything is empty."""
    axes = masks.dim() - 2
    outside = functional.pad(1 - masks, [steps] * 2 * axes, value=1.0)
    inner = 1 - dilate(outside, steps)
    if not steps:
        return masks
    for axis in range(2, masks.dim()):
        inner = inner.narrow(axis, steps, masks.shape[axis])
    return inner


def contour(masks: Tensor) -> Tensor:
    """A mask minus its one-step erosion (ELCFS): (n, C, …) → (n, C, …)."""
    return masks - erode(masks)


def surroundings(masks: Tensor) -> Tensor:
    """The five-step dilation of a mask minus the mask (ELCFS): (n, C, …) → (n, C, …)."""
    return dilate(masks, RING) - masks


def region_means(maps: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean feature of each region."""
    sums = torch.einsum("nfp,ncp->ncf", maps.flatten(2), regions.flatten(2))
    sizes = regions.flatten(2).sum(2)
    return sums / sizes.clamp(min=1)[..., None], sizes > 0


def contrastive_loss(embeddings: Tensor, labels: Tensor, temperature: float = 0.05) -> Tensor:
    """NT-Xent with labels: mean of ``−log( e^{s_ap/τ} / (e^{s_ap/τ} + Σ_n e^{s_an/τ}) )``, a scalar (ELCFS).

    The mean is over all pairs (a, p), a ≠ p, of one label; n runs over the other labels; s is cosine similarity. It is
    zero where no two embeddings have the same label.
    """
    directions = functional.normalize(embeddings, dim=1)
    similarities = directions @ directions.T / temperature
    same = labels[:, None] == labels[None, :]
    negatives = similarities.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    losses = functional.softplus(negatives - similarities)
    pairs = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return (losses * pairs).sum() / pairs.sum().clamp(min=1)


def boundary_loss(maps: Tensor, masks: Tensor, temperature: float = 0.05, *, added: bool = False) -> Tensor:
    """ELCFS's L_boundary: contrast contours with surroundings, over images and their copies; mean over structures."""
    (edges, has_edge), (rings, has_ring) = region_means(maps, contour(masks)), region_means(maps, surroundings(masks))
    losses = []
    for structure in range(masks.shape[1]):
        inner, outer = edges[:, structure][has_edge[:, structure]], rings[:, structure][has_ring[:, structure]]
        labels = torch.cat([torch.ones(len(inner)), torch.zeros(len(outer))]).to(maps.device)
        losses.append(contrastive_loss(torch.cat([inner, outer]), labels, temperature))
    whole = torch.stack(losses)
    return whole.sum() if added else whole.mean()


def rounded_shares(samples: Mapping[str, int], decimals: int = 2) -> dict[str, float]:
    """``N_k/ΣN`` rounded; the last site's share completes the others to 1 (ELCFS's released code)."""
    total = sum(samples.values())
    if total <= 0:
        raise UserError("shares need at least one sample")
    *others, last = samples
    shares = {site: round(samples[site] / total, decimals) for site in others}
    return {**shares, last: 1.0 - sum(shares.values())}
