"""CSAC: collaborative semantic aggregation and calibration.

Yuan, Ma, Chen, Wu, Lin, Kuang: Collaborative Semantic Aggregation and Calibration for Federated Domain Generalization.
IEEE TKDE 2023 (an early version: Collaborative Semantic Aggregation and Calibration for Separated Domain
Generalization).

Setting: domain generalization; H labelled sources, the target is never seen.
Wire: one model up and one down per site and round, 2·H·S(θ), and one upload after local acquisition. The frozen local
model, projections and attention stay at the site.

Local acquisition, once: every site trains G^h on cross-entropy with smoothed labels and keeps a frozen copy L^h.
Then in every round
    A_l = (1/H) Σ_h G_l^h,   d_l^h = ‖G_l^h − A_l‖,   w_l^h = d_l^h / Σ_j d_l^j,   M_l = Σ_h w_l^h G_l^h       (2–4)
    L_CB = L_CE(M) + λ · Σ_{l,m ∈ R} α_{l,m} · MMD(M_l(x)', L_m^h(x)')                                        (5, 6, 10)
    α = ½ softmax_m(mean A_lᵀB_m) + ½ softmax_m(mean A_l B_mᵀ), constant for back-propagation                  (7–9)
where ' is a projection to a common shape, one convolution per layer and side.

Where the paper and its code differ (and what is done here)
 1. The code parses label smoothing and never uses it. Here it is used; ``label_smoothing: 0`` is the code.
 2. "Layer" means each state-dict entry in the code; ``granularity: module`` measures a module's parameters together.
 3. L^h is the acquired model, frozen for all rounds; ``frozen: fused`` is the code's mirrored switch (M frozen, the
    site's own model trains).
 4. If all distances are zero, shares are equal. A single zero distance has share 0 (the code overwrites its sum there).
 5. ``logit_mmd`` adds the code's MMD between logits, which is not in the paper; off. In the code the cross-layer loss
    never runs, because its list of stages is empty. So the released code is acquisition without smoothing, L2 fusion,
    cross-entropy and λ times the MMD of logits: ``setting: released``.
 6. ``query_key`` adds the code's 1×1 convolutions, which never get a gradient and stay random. Off.
 7. The code makes new random projections in every round (``reset_projection_each_round``); here they persist.
 8. Common shape: 32 channels at the last stage's size (code); ``projection_size: smallest`` as in the early version.
 9. ``scale`` divides the affinities by √c and √d: raw means can saturate the softmax. Not in the paper; off.
10. An epoch of the code is 60 or 20 mini-batches: see ``acquisition_steps`` and ``calibration_steps``.
11. The code reports the best *target* accuracy over rounds (our ``oracle`` column) and never fuses the last round's
    models; here they are fused, and the headline is the last fused model.
12. MMD is the code's U-type estimator without its constant; ``mmd_estimator: biased`` is a true distance.

Should reproduce: Rotated MNIST 94.07 ± 0.02; PACS ResNet-18 83.81 ± 0.33 (journal); ablations of its Tables 4 and 5.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import UserError, nearest
from fedshift.federation.exchange import Replies
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.divergence_weighting import divergence_aggregate
from fedshift.functional.losses import smoothed_cross_entropy
from fedshift.functional.mmd import cross_multi_kernel_mmd, multi_kernel_mmd
from fedshift.functional.projection import projection_layer
from fedshift.methods.base import Method, State
from fedshift.methods.robust import Averaged, Averages
from fedshift.methods.settings import Settings
from fedshift.models.network import Network
from fedshift.weights import Weights

CACHED_FEATURES = 1 << 30
"""Bytes of frozen features that a site keeps rather than computes again in every epoch."""


class CSAC(Method):
    """The farthest model weighs most; sites then align the fused model with what they knew, across layers."""

    name: ClassVar[str] = "csac"
    citation: ClassVar[str] = "Yuan et al., IEEE TKDE 2023"
    memory_names: ClassVar[tuple[str, ...]] = ("local_model", "projections", "optimizer")
    averages: ClassVar[Averages] = {"acquire": Averaged(), "calibrate": Averaged()}
    relative_cost: ClassVar[float] = 1.5
    settings: ClassVar[Settings] = {
        "released": {"label_smoothing": 0.0, "stages": (), "logit_mmd": True},
    }

    acquisition_epochs: PositiveInt = Field(30, description="epochs of local acquisition, once")
    acquisition_steps: PositiveInt | None = Field(None, description="mini-batches of acquisition instead (code: 1800)")
    calibration_epochs: PositiveInt = Field(10, description="epochs of calibration per round (5 on Rotated MNIST)")
    calibration_steps: PositiveInt | None = Field(None, description="mini-batches of calibration per round (code: 200)")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="α of local acquisition; 0 = code")
    aggregation: Literal["divergence", "similarity", "average"] = Field(
        "divergence", description="w_l^h grows with d_l^h, with 1/d_l^h, or is 1/H (ablations of Table 4)"
    )
    distance: Literal["l2", "l1", "cosine"] = Field("l2", description="d_l^h (ablations of Table 4)")
    distance_power: PositiveFloat = Field(1.0, description="p of w_l^h ∝ (d_l^h)^p; not in the paper, which has 1")
    granularity: Literal["tensor", "module"] = Field("tensor", description="what shares one d_l^h")
    alignment_weight: NonNegativeFloat = Field(0.6, description="λ; 0 = without alignment (ablation of Table 5)")
    alignment: Literal["cross_layer", "same_layer"] = Field("cross_layer", description="pairs (l, m), or only l = m")
    attention: Literal["both", "position", "channel", "none"] = Field("both", description="which affinities make α")
    uniform_attention: Literal["one", "per_row"] = Field(
        "one", description="attention none: weight 1 for each pair (code), or 1/|R| so that rows sum to 1"
    )
    scale: bool = Field(False, description="affinities divided by √c and √d")
    query_key: bool = Field(False, description="the code's untrained 1×1 convolutions before the affinities")
    measure: Literal["mmd", "mse"] = Field("mmd", description="MMD, or mean squared error (ablation of Table 5)")
    mmd_estimator: Literal["unbiased", "biased"] = Field("unbiased", description="U-type (code) or V-type")
    mmd_constant: bool = Field(False, description="add the code's constant 2/(n−1); no gradient")
    logit_mmd: bool = Field(False, description="the code's extra MMD between logits")
    cross_entropy: bool = Field(True, description="L_CE in calibration (off: ablation of Table 5)")
    frozen: Literal["local", "fused"] = Field("local", description="which side is frozen; fused = the code's switch")
    projection_channels: PositiveInt = Field(32, description="c of the common shape")
    projection_size: Literal["last", "smallest"] = Field("last", description="g×w of the common shape: of which stage")
    reset_projection_each_round: bool = Field(False, description="new random projections every round (code)")
    stages: tuple[str, ...] | None = Field(
        None, description="R: aligned stages; none = the network's default, [] = no stage (what was released)"
    )

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        acquisition = self.acquisition_steps or self.acquisition_epochs * batches_per_epoch
        return acquisition + rounds * (self.calibration_steps or self.calibration_epochs * batches_per_epoch)

    def check(self, network: Network) -> None:
        if not self.cross_entropy and not self._aligns:
            raise UserError(
                "csac: nothing to minimise in calibration; switch cross_entropy on or raise alignment_weight"
            )
        for stage in self.stages or ():
            if stage not in network.stages:
                raise UserError(f"csac.stages: the network has no stage '{stage}'; {nearest(stage, network.stages)}")

    @property
    def _aligns(self) -> bool:
        """Whether calibration has a loss besides cross-entropy."""
        return self.alignment_weight > 0 and (self.stages != () or self.logit_mmd)

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        # Every site builds the common start from the experiment's seed, so nothing is sent.
        updates = federation.ask(self.acquire, to=federation.sources)
        fused, report = self.fuse(updates)
        return State(fused, report=report)

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.calibrate, to=federation.sources, weights=state.weights)
        fused, report = self.fuse(updates)
        return state.advance(fused, report=report)

    def fuse(self, updates: Replies[Update]) -> tuple[Weights, dict[str, dict[str, object]]]:
        """Data-free semantic aggregation (2–4). It passes over the replies three times, so they are kept."""
        models = _Models(updates.keep())
        fused, shares = divergence_aggregate(
            models,
            distance=self.distance,
            granularity=self.granularity,
            rule=self.aggregation,
            power=self.distance_power,
        )
        by_layer = {layer: dict(zip(updates.sites, row, strict=True)) for layer, row in shares.items()}
        return fused, {"losses": dict(updates.numbers("loss")), "aggregation_weights": dict(by_layer)}

    # Site ---------------------------------------------------------------------------------------------------------

    def acquire(self, site: Site) -> Update:
        """Local acquisition: train on smoothed cross-entropy from the common start, and keep a frozen copy as L^h."""
        model = site.model()
        loss = site.minimise(
            lambda batch: smoothed_cross_entropy(model(batch.inputs), batch.targets, self.label_smoothing),
            model,
            epochs=self.acquisition_epochs,
            steps=self.acquisition_steps,
        )
        trained = site.weights_of(model)
        site.memory["local_model"] = trained
        site.scratch.pop("frozen_features", None)  # they belong to an earlier acquisition
        return Update(trained, site.samples, loss)

    def calibrate(self, site: Site, weights: Weights) -> Update:
        """Cross-layer calibration of the fused model (5–10)."""
        local = site.memory.weights("local_model")
        model = site.model(weights if self.frozen == "local" else local)
        trained: list[nn.Module] = [model]
        aligner: _Aligner | None = None
        if self._aligns:
            reference = site.model(local if self.frozen == "local" else weights).eval().requires_grad_(False)
            aligner = _Aligner(self, site, reference)
            trained.append(aligner)

        def loss(batch: Batch) -> Tensor:
            if aligner is None:
                return F.cross_entropy(model(batch.inputs), batch.targets)
            logits, features = model.with_stages(batch.inputs, aligner.stages)
            alignment: Tensor = self.alignment_weight * aligner(logits, features, batch)
            return F.cross_entropy(logits, batch.targets) + alignment if self.cross_entropy else alignment

        if self.reset_projection_each_round:
            site.memory.pop("optimizer", None)  # its momentum belongs to other projections
        # The code's two optimisers have the same settings, so here one optimiser has both modules' parameters.
        mean = site.minimise(
            loss,
            *trained,
            epochs=self.calibration_epochs,
            steps=self.calibration_steps,
            remember="optimizer",
        )
        calibrated = site.weights_of(model)
        if aligner is not None and aligner.stages:
            site.memory["projections"] = site.weights_of(aligner.projections)
        if self.frozen == "fused":
            site.memory["local_model"] = calibrated
        return Update(calibrated, site.samples, mean)


def _height_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a stage's map: a volume's without its depth; a sequence is of height 1."""
    if len(shape) == 1:
        return 1, 1
    height, width = (1, *shape[1:])[-2:]
    return height, width


class _Models:
    """Re-iterable view of the models in kept replies, one in memory at a time."""

    def __init__(self, updates: Replies[Update]) -> None:
        self.updates = updates

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (update.weights for update in self.updates)


class _Aligner(nn.Module):
    """L_AL of one exchange: the frozen reference, the projections of both sides, attention and MMD."""

    def __init__(self, method: CSAC, site: Site, reference: Network) -> None:
        super().__init__()
        self.method, self.site = method, site
        self.stages = tuple(reference.alignment_stages if method.stages is None else method.stages)
        # In a tuple, so that the frozen network is not among this module's parameters.
        self._reference = (reference,)
        self._cache = self._frozen_features() if site.fixed_inputs else None
        shapes = [tuple(feature.shape[1:]) for feature in self._measure()]
        sizes = [_height_and_width(shape) for shape in shapes] or [(1, 1)]
        size = sizes[-1] if method.projection_size == "last" else min(sizes, key=math.prod)
        persistent = "projections" in site.memory and not method.reset_projection_each_round
        seed = site.generator_for("projections").initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = [projection_layer(shape, method.projection_channels, size) for shape in (*shapes, *shapes)]
        self.projections = site.place(nn.ModuleList(layers).to(memory_format=torch.channels_last))
        if persistent:
            self.projections.load_state_dict(dict(site.memory.weights("projections")))
        self._keys = [self._query_keys(len(layers))] if method.query_key else []  # a list: not trained

    def _query_keys(self, number: int) -> nn.ModuleList:
        """The 1×1 convolutions of ``query_key``: random, never trained, redrawn when the projections are."""
        exchange = self.site.envelope.exchange if self.method.reset_projection_each_round else 0
        channels = self.method.projection_channels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.site.seed, self.site.name, exchange, "query_key"))
            keys = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(number))
        return self.site.place(keys).requires_grad_(False)

    def forward(self, logits: Tensor, features: dict[str, Tensor], batch: Batch) -> Tensor:
        method = self.method
        frozen_logits, frozen = self._frozen(batch)
        loss = logits.new_zeros(())
        if self.stages:
            loss = self._across_layers(features, frozen)
        if method.logit_mmd:
            loss = loss + multi_kernel_mmd(logits, frozen_logits, estimator=method.mmd_estimator)
        return loss

    def _across_layers(self, features: dict[str, Tensor], frozen: list[Tensor]) -> Tensor:
        """L_AL of (6): Σ α_{l,m} · MMD over all pairs of stages."""
        method, number = self.method, len(self.stages)
        ours = [layer(features[stage]) for layer, stage in zip(self.projections[:number], self.stages, strict=True)]
        theirs = [layer(feature) for layer, feature in zip(self.projections[number:], frozen, strict=True)]
        fused, local = torch.stack(ours), torch.stack(theirs)
        left, right = fused.flatten(2), local.flatten(2)
        if method.measure == "mse":
            pairs = (left[:, None] - right[None]).square().mean(dim=(2, 3))
        else:
            pairs = cross_multi_kernel_mmd(left, right, estimator=method.mmd_estimator, constant=method.mmd_constant)
        return (self._attention(fused, local) * pairs).sum()

    def _attention(self, fused: Tensor, local: Tensor) -> Tensor:
        """α of (9), or that of an ablation, (|R|, |R|).

        Args:
            fused: projected stages of the fused model, (|R|, n, c, g, w).
            local: those of the frozen local model, likewise.
        """
        method, number = self.method, len(self.stages)
        if method.alignment == "same_layer":
            return torch.eye(number, device=fused.device)
        if method.attention == "none":
            return torch.full(
                (number, number), 1.0 if method.uniform_attention == "one" else 1 / number, device=fused.device
            )
        if method.query_key:
            keys = self._keys[0]
            fused = torch.stack([key(map_) for key, map_ in zip(keys[:number], fused, strict=True)])
            local = torch.stack([key(map_) for key, map_ in zip(keys[number:], local, strict=True)])
        return cross_layer_attention(
            fused,
            local,
            position=method.attention in ("both", "position"),
            channel=method.attention in ("both", "channel"),
            scale=method.scale,
        )

    # Without augmentation, the frozen model's features of a sample never change, so they are computed once.

    @torch.no_grad()
    def _compute(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits, features = self._reference[0].with_stages(inputs, self.stages)
        return logits, list(features.values())

    def _measure(self) -> list[Tensor]:
        """The frozen features of one sample, for their shapes."""
        return self._compute(self.site.data.batch(torch.zeros(1, dtype=torch.int64))[0])[1]

    def _frozen(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        if self._cache is None:
            return self._compute(batch.inputs)
        rows = batch.rows.to(batch.inputs.device)
        logits, *features = (part.index_select(0, rows) for part in self._cache)
        return logits, [map_.permute(0, 3, 1, 2) if map_.dim() == 4 else map_ for map_ in features]

    def _frozen_features(self) -> list[Tensor] | None:
        """The frozen model's logits and features of every sample; None if they would take too much memory.

        Maps are kept as (n, h, w, c), so that selected rows are channels-last for the projections without a copy.
        """
        key = "frozen_features" if self.method.frozen == "local" else None  # a frozen M changes every round
        if key in self.site.scratch:
            return self.site.scratch[key]  # type: ignore[no-any-return]
        per_sample = sum(feature.numel() * feature.element_size() for feature in self._measure())
        if per_sample * self.site.samples > CACHED_FEATURES:
            return None
        parts = [[logits, *features] for logits, features in (self._compute(b.inputs) for b in self.site.all_batches())]
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        cache = [part.permute(0, 2, 3, 1).contiguous() if part.dim() == 4 else part for part in columns]
        if key is not None:
            self.site.scratch[key] = cache
        return cache
