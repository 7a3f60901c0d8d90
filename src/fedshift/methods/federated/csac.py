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

Where the paper and its code differ (and what is done here). Code: junkunyuan/CSAC, mains/exam_align.py, `FLDG`, unless
another file is named
 1. The code parses label smoothing and never uses it. Here it is used; ``label_smoothing: 0`` is the code
    (utils/parse_params.py, `args_parser`).
 2. "Layer" means each state-dict entry in the code; ``granularity: module`` measures a module's parameters together
    (`FLDG._weightavg_`).
 3. L^h is the acquired model, frozen for all rounds; ``frozen: fused`` is the code's mirrored switch (M frozen, the
    site's own model trains) (`FLDG.train`).
 4. If all distances are zero, shares are equal. A single zero distance has share 0 (the code overwrites its sum there:
    `FLDG._weightavg_`).
 5. ``logit_mmd`` adds the code's MMD between logits, which is not in the paper; off. In the code the cross-layer loss
    never runs, because its list of stages is empty (models/script/attention.py, `DAAttention.forward`). So the released
    code is acquisition without smoothing, L2 fusion, cross-entropy and λ times the MMD of logits: ``setting: released``
    (utils/script/trainer.py, `AlignPrivateTrainer.cal_loss`).
 6. ``query_key`` adds the code's 1×1 convolutions before the position map (models/script/attention.py, `PAM_Module`;
    `CAM_Module` has none). They never get a gradient and stay random. Off.
 7. The code makes new random projections in every round (`FLDG.clienttrainer`; ``reset_projection_each_round``); here
    they persist.
 8. Common shape: 32 channels at the last stage's size (code: models/script/attention.py, `Fit`); ``projection_size:
    smallest`` as in the early version. The paper's one convolution may be cheaper than the code's: ``projection:
    strided`` or ``pooled``, fewer ``projection_channels``.
 9. ``scale`` divides the affinities by √c and √d: raw means can saturate the softmax. Not in the paper; off.
10. An epoch of the code is 60 or 20 mini-batches: see ``acquisition_steps`` and ``calibration_steps``
    (utils/script/trainer.py, `Trainer._epoch_train`).
11. The code reports the best *target* accuracy over rounds (our ``oracle`` column) and never fuses the last round's
    models; here they are fused, and the headline is the last fused model (`FLDG.train`).
12. MMD is the code's U-type estimator without its constant; ``mmd_estimator: biased`` is a true distance
    (models/script/multikernel.py, `MultipleKernelMaximumMeanDiscrepancy.forward`).

``setting: practical`` has w_l^h ∝ (d_l^h)² and no alignment, at FedAvg's cost. It was chosen on the targets of Rotated
MNIST (Ghifary's images), where it is 0.62 above the paper's setting. On PACS features, where nothing was chosen, it is
level with it (−0.05).

Should reproduce: Rotated MNIST 94.07 ± 0.02; PACS ResNet-18 83.81 ± 0.33 (journal); ablations of its Tables 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError, nearest
from fedshift.federation.exchange import Replies
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.replies import About, Bounds, Tensors
from fedshift.federation.site import Batch, Site
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.averaging import MeanAccumulator, float64_chunks, is_buffer
from fedshift.functional.mmd import multi_kernel_mmd, weighted_multi_kernel_mmd
from fedshift.functional.projection import Reduction, projection_layer
from fedshift.methods.base import Method, Samples, State
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network, StageReader
from fedshift.weights import Weights

CACHED_FEATURES = 1 << 30
"""Bytes of frozen features that a site keeps rather than computes again in every epoch."""
_MOST_POWER = 2.0
"""Largest power of the distances that a sum hides: with a larger one the farthest model takes nearly all of it."""
_LARGEST = 2.0**31
"""Largest value of d and d · (G − A): larger numbers cannot be summed."""


@dataclass(frozen=True)
class Weighed(Reply):
    """What a site adds to the sums of `CSAC.fuse_sums`: d_l · (G_l − A_l) and d_l of each float tensor."""

    weighted: Weights
    distances: Weights


class AlignmentOptions(BaseModel):
    """Options of CSAC that say how stages of the fused and of the local model are compared."""

    alignment: Literal["cross_layer", "same_layer"] = Field("cross_layer", description="pairs (l, m), or only l = m")
    attention: Literal["both", "position", "channel", "none"] = Field("both", description="which affinities make α")
    uniform_attention: Literal["one", "per_row"] = Field(
        "one", description="attention none: weight 1 for each pair (code), or 1/|R| so that rows sum to 1"
    )
    scale: bool = Field(False, description="affinities divided by √c and √d")
    query_key: bool = Field(False, description="the code's untrained 1×1 convolutions before the positions' affinities")
    measure: Literal["mmd", "mse"] = Field("mmd", description="MMD, or mean squared error (ablation of Table 5)")
    mmd_estimator: Literal["unbiased", "biased"] = Field("unbiased", description="U-type (code) or V-type")
    mmd_constant: bool = Field(False, description="add the code's constant 2/(n−1); no gradient")
    logit_mmd: bool = Field(False, description="the code's extra MMD between logits")
    frozen: Literal["local", "fused"] = Field("local", description="which side is frozen; fused = the code's switch")
    projection_channels: PositiveInt = Field(32, description="c of the common shape")
    projection_size: Literal["last", "smallest"] = Field("last", description="g×w of the common shape: of which stage")
    projection: Reduction = Field(
        "released",
        description="the convolution that reduces larger maps: the code's, of kernel s−t+1; strided, in steps of ⌊s/t⌋ "
        "(3×3 from 12 to 4 positions); or pooled and 1×1. The last two take far less arithmetic",
    )
    reset_projection_each_round: bool = Field(False, description="new random projections every round (code)")
    stages: tuple[str, ...] | None = Field(
        None, description="R: aligned stages; none = the network's default, [] = no stage (what was released)"
    )


class CSAC(Method, AlignmentOptions):
    """The farthest model weighs most; sites then align the fused model with what they knew, across layers."""

    traits = Traits(
        name="csac",
        citation="Yuan et al., IEEE TKDE 2023",
        group="unseen",
        advice="Take setting: practical, as good and cheaper. No gain over FedAvg is shown: +1.17 on Rotated "
        "MNIST, where it was chosen (p = 0.584), +0.68 on PACS features (p = 1.000); the paper's has +0.54 "
        "(p = 0.629) and +0.73 (p = 1.000). Train long: −1.11 at 40 epochs. Give it a robust rule where a "
        "site may be bad.",
        settings={
            "released": {"label_smoothing": 0.0, "stages": (), "logit_mmd": True},
            "practical": {"distance_power": 2.0, "alignment_weight": 0.0},
        },
        small={"acquisition_epochs": 2, "calibration_epochs": 1},
        tasks=WITHOUT_MASKS,
        memory_names=("local_model", "projections", "optimizer", "sent"),
        averages={"acquire": Averaged(), "calibrate": Averaged()},
        server_reads="sums",
        asked_once={"weigh": "sent"},
        relative_cost=1.5,
        tests=MethodTests(
            beside={"acquisition_steps": 3, "calibration_steps": 2},
            options={
                "uniform_attention": tries("per_row", attention="none"),
                "projection_channels": tries(5),
                "projection_size": tries("smallest", stages=("conv2", "conv1")),
                "stages": tries(("conv2",), ("conv2", "hidden"), ()),
                "acquisition_epochs": tries(2, 3, acquisition_steps=None, acquisition_epochs=1),
                "acquisition_steps": tries(2),
                "calibration_epochs": tries(2, 3, calibration_steps=None, calibration_epochs=1),
                "calibration_steps": tries(1),
                "label_smoothing": tries(0.0, 0.4),
                "distance_power": tries(2.0),
                "alignment_weight": tries(0.0, 3.0),
            },
            elsewhere={"mmd_constant": (True,), "projection": ("strided",)},
            golden={"acquisition_epochs": 5, "calibration_epochs": 2, "alignment_weight": 0.1},
        ),
    )

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
    cross_entropy: bool = Field(True, description="L_CE in calibration (off: ablation of Table 5)")

    def adjust_traits(self, traits: Traits) -> Traits:
        """Shares by 1/d cannot be made of sums, since a distance of 0 takes them all; nor by a high power of d.

        Every site gets the mean and the fused model, another sum, whose shares follow from the models.
        """
        if self.aggregation == "average":
            return traits
        single = self.aggregation == "similarity" or self.distance_power > _MOST_POWER
        return replace(traits, server_reads="norms" if single else "sums", sums_per_model=2)

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "weigh":
            return {}
        floats = {name: value for name, value in about.network.state_dict().items() if value.is_floating_point()}
        shapes = {name: tuple(value.shape) for name, value in floats.items()}
        return {
            "weighted": Tensors(shapes, low=-_LARGEST, high=_LARGEST),
            "distances": Tensors(dict.fromkeys(shapes, ()), low=0, high=_LARGEST, dtype=torch.float64),
        }

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

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        if not samples.tokens or not self.alignment_weight or self.stages == ():
            return ()
        return (
            "csac: on tokens it aligns stages position by position, those after a text's end among them; of positions "
            "it knows no more than that (setting: practical aligns nothing)",
        )

    @property
    def _aligns(self) -> bool:
        """Whether calibration has a loss besides cross-entropy."""
        return self.alignment_weight > 0 and (self.stages != () or self.logit_mmd)

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        # Every site builds the common start from the experiment's seed, so nothing is sent.
        if federation.sums_only:
            fused, report = self.fuse_sums(federation, federation.ask(self.acquire, to=federation.sources, keep=True))
        else:
            fused, report = self.fuse(federation.ask(self.acquire, to=federation.sources))
        return State(fused, report=report)

    def round(self, federation: Federation, state: State) -> State:
        sources, weights = federation.sources, state.weights
        if federation.sums_only:
            updates = federation.ask(self.calibrate, to=sources, weights=weights, keep=True)
            fused, report = self.fuse_sums(federation, updates)
        else:
            fused, report = self.fuse(federation.ask(self.calibrate, to=sources, weights=weights))
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

    def fuse_sums(self, federation: Federation, updates: Replies[Update]) -> tuple[Weights, dict[str, Any]]:
        """The same from sums alone: the mean A goes back, and each site answers with d and d · (G − A)."""
        mean = updates.mean("uniform")
        report = {"losses": mean.numbers["loss"]}
        if self.aggregation == "average":
            return mean.model(), report
        parts = federation.ask_further(self.weigh, to=federation.sources, mean=mean.model()).mean("uniform")
        return fused_from_sums(mean.model(), parts.model("weighted"), parts.model("distances")), report

    # Site ---------------------------------------------------------------------------------------------------------

    def weigh(self, site: Site, mean: Weights) -> Weighed:
        """The distances d_l of the model that the site sent last, and d_l · (G_l − A_l); ``mean``: A."""
        weighted, result = distance_weighted(
            site.memory.weights("sent"), mean, self.distance, self.granularity, self.distance_power
        )
        return Weighed(weighted, result)

    def acquire(self, site: Site, keep: bool = False) -> Update:
        """Local acquisition: train on smoothed labels from the common start, and keep a frozen copy as L^h."""
        model = site.model()
        loss = site.minimise(
            lambda batch: site.objective.smoothed_loss(model(batch.inputs), batch.targets, self.label_smoothing),
            model,
            epochs=self.acquisition_epochs,
            steps=self.acquisition_steps,
        )
        trained = site.weights_of(model)
        site.memory["local_model"] = trained
        if keep:
            site.memory["sent"] = trained
        site.scratch.pop("frozen_features", None)  # they belong to an earlier acquisition
        return Update(trained, site.samples, loss)

    def calibrate(self, site: Site, weights: Weights, keep: bool = False) -> Update:
        """Cross-layer calibration of the fused model (5–10)."""
        local = site.memory.weights("local_model")
        model = site.model(weights if self.frozen == "local" else local)
        trained: list[nn.Module] = [model]
        aligner: Aligner | None = None
        if self._aligns:
            reference = site.model(local if self.frozen == "local" else weights).eval().requires_grad_(False)
            aligner = Aligner(self, site, reference)
            trained.append(aligner)
        read = StageReader(model, () if aligner is None else aligner.stages)

        def loss(batch: Batch) -> Tensor:
            logits, features = read(batch.inputs)
            if aligner is None:
                return site.objective.loss(logits, batch.targets)
            alignment: Tensor = self.alignment_weight * aligner(logits, features, batch)
            return site.objective.loss(logits, batch.targets) + alignment if self.cross_entropy else alignment

        if self.reset_projection_each_round:
            site.memory.pop("optimizer", None)  # its momentum belongs to other projections
        # The code's two optimisers have the same settings, so here one optimiser has both modules' parameters.
        with read:
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
        if keep:
            site.memory["sent"] = calibrated
        return Update(calibrated, site.samples, mean)


class _Models:
    """Re-iterable view of the models in kept replies, one in memory at a time."""

    def __init__(self, updates: Replies[Update]) -> None:
        self.updates = updates

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (update.weights for update in self.updates)


# The alignment loss at a site: the frozen reference, both projections, attention and MMD (6–10) -----------------------


class Aligner(nn.Module):
    """L_AL of one exchange: the frozen reference, the projections of both sides, attention and MMD."""

    def __init__(self, options: AlignmentOptions, site: Site, reference: Network) -> None:
        super().__init__()
        self.options, self.site = options, site
        self.stages = tuple(reference.alignment_stages if options.stages is None else options.stages)
        # In a tuple, so that the frozen network is not among this module's parameters.
        self._reference = (reference,)
        self._cache = self._frozen_features() if site.fixed_inputs else None
        shapes = [tuple(feature.shape[1:]) for feature in self._measure()]
        sizes = [_height_and_width(shape) for shape in shapes] or [(1, 1)]
        size = sizes[-1] if options.projection_size == "last" else min(sizes, key=math.prod)
        persistent = "projections" in site.memory and not options.reset_projection_each_round
        seed = site.generator_for("projections").initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = [
                projection_layer(shape, options.projection_channels, size, reduction=options.projection)
                for shape in (*shapes, *shapes)
            ]
        self.projections = site.place(nn.ModuleList(layers).to(memory_format=torch.channels_last))
        if persistent:
            self.projections.load_state_dict(dict(site.memory.weights("projections")))
        self._keys = [self._query_keys(len(layers))] if options.query_key else []  # a list: not trained

    def _query_keys(self, number: int) -> nn.ModuleList:
        """The 1×1 convolutions of ``query_key``: random, never trained, redrawn when the projections are."""
        exchange = self.site.envelope.exchange if self.options.reset_projection_each_round else 0
        channels = self.options.projection_channels
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.site.seed, self.site.name, exchange, "query_key"))
            keys = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(number))
        return self.site.place(keys).requires_grad_(False)

    def forward(self, logits: Tensor, features: dict[str, Tensor], batch: Batch) -> Tensor:
        options = self.options
        frozen_logits, frozen = self._frozen(batch)
        across = self._across_layers(features, frozen) if self.stages else logits.new_zeros(())
        if not options.logit_mmd:
            return across
        return across + multi_kernel_mmd(logits, frozen_logits, estimator=options.mmd_estimator)

    def _across_layers(self, features: dict[str, Tensor], frozen: list[Tensor]) -> Tensor:
        """L_AL of (6): Σ α_{l,m} · MMD over all pairs of stages."""
        options, number = self.options, len(self.stages)
        ours = [layer(features[stage]) for layer, stage in zip(self.projections[:number], self.stages, strict=True)]
        theirs = [layer(feature) for layer, feature in zip(self.projections[number:], frozen, strict=True)]
        fused, local = torch.stack(ours), torch.stack(theirs)
        left, right, attention = fused.flatten(2), local.flatten(2), self._attention(fused, local)
        if options.measure == "mse":
            return (attention * (left[:, None] - right[None]).square().mean(dim=(2, 3))).sum()
        return weighted_multi_kernel_mmd(
            left, right, attention, estimator=options.mmd_estimator, constant=options.mmd_constant
        )

    def _attention(self, fused: Tensor, local: Tensor) -> Tensor:
        """α of (9), or that of an ablation, (|R|, |R|).

        ``fused``: projected stages of the fused model, (|R|, n, c, g, w).
        """
        options, number = self.options, len(self.stages)
        if options.alignment == "same_layer":
            return torch.eye(number, device=fused.device)
        if options.attention == "none":
            return torch.full(
                (number, number), 1.0 if options.uniform_attention == "one" else 1 / number, device=fused.device
            )
        queries, keys = fused, local
        if options.query_key:
            layers = self._keys[0]
            queries = torch.stack([layer(map_) for layer, map_ in zip(layers[:number], fused, strict=True)])
            keys = torch.stack([layer(map_) for layer, map_ in zip(layers[number:], local, strict=True)])
        return cross_layer_attention(
            fused,
            local,
            queries=queries,
            keys=keys,
            position=options.attention in ("both", "position"),
            channel=options.attention in ("both", "channel"),
            scale=options.scale,
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
        key = "frozen_features" if self.options.frozen == "local" else None  # the frozen model changes every round
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


def _height_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of a stage's map: of a volume without its depth; a sequence has height 1."""
    if len(shape) == 1:
        return 1, 1
    height, width = (1, *shape[1:])[-2:]
    return height, width


Distance = Literal["l2", "l1", "cosine"]


Granularity = Literal["tensor", "module"]


Rule = Literal["divergence", "similarity", "average"]


# 1 − cos of directions that differ by float64 rounding is below about 1e-30, by float32 rounding above about 1e-16.
_COSINE_ROUNDING = 1e-24


def tensor_distance(tensor: Tensor, mean: Tensor, kind: Distance = "l2") -> float:
    """Distance between two tensors of one shape, flattened, accumulated in float64 (CSAC, Table 4)."""
    return _distance([(tensor, mean)], kind)


def distances(
    weights: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    kind: Distance = "l2",
    granularity: Granularity = "tensor",
) -> dict[str, float]:
    """Distance ``d_l = dist(G_l, A_l)`` of a site's model to the mean, for every float tensor (2–4)."""
    floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    if granularity == "tensor":
        return {name: tensor_distance(weights[name], mean[name], kind) for name in floats}
    modules: dict[str, list[str]] = {}
    for name in floats:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    measured: dict[str, float] = {}
    for names in modules.values():
        parameters = [name for name in names if not is_buffer(name)] or names
        together = _distance([(weights[name], mean[name]) for name in parameters], kind)
        measured.update(dict.fromkeys(names, together))
    return {name: measured[name] for name in floats}


def divergence_weights(distances: Sequence[float], rule: Rule = "divergence", power: float = 1.0) -> list[float]:
    """The sites' shares of one layer, from their distances to the mean (CSAC, equation 3 and Table 4)."""
    count = len(distances)
    if not count:
        raise UserError("there is no site to aggregate: not one distance was given")
    for distance in distances:
        if not (math.isfinite(distance) and distance >= 0):
            raise UserError(f"distance {distance} to the mean model must be a finite number of at least 0")
    if not (math.isfinite(power) and power > 0):
        raise UserError(f"the power of the distances must be a finite number above 0, found {power}")
    largest = max(distances)
    if rule == "average" or largest == 0:
        return [1 / count] * count
    # Division by an extreme keeps sums and reciprocals in range.
    if rule == "divergence":
        shares = [(distance / largest) ** power for distance in distances]
    else:
        smallest = min(distances)
        shares = [(smallest / d) ** power if smallest else float(d == 0) for d in distances]
    total = math.fsum(shares)
    return [share / total for share in shares]


def divergence_aggregate(
    models: Iterable[Mapping[str, Tensor]],
    distance: Distance = "l2",
    granularity: Granularity = "tensor",
    rule: Rule = "divergence",
    power: float = 1.0,
) -> tuple[Weights, dict[str, list[float]]]:
    """Fuse the sites' models layer by layer, ``M_l = Σ_h w_l^h G_l^h``, by distances to the mean (CSAC, eq. 2 to 4).

    Three passes over the models compute the mean ``A_l``, the distances and the fused sum; the rule ``"average"`` needs
    one pass. Each pass holds one model and one float64 sum. So a list works, and so does an object whose ``__iter__``
    reads the models one by one: then memory does not grow with the number of sites.
    """
    if isinstance(models, Iterator):
        raise UserError("models can be iterated only once but aggregation passes three times: give a list")
    average = MeanAccumulator()
    count = 0
    for model in models:
        average.add(model, 1.0, f"model {count}")
        count += 1
    # In float64: a rounded mean of two models one unit in the last place apart would equal one of them.
    mean = average.result(None if rule == "average" else torch.float64)
    del average
    mean.check_finite("the mean of the models")
    if rule == "average":
        return mean, {name: [1 / count] * count for name, tensor in mean.items() if tensor.is_floating_point()}
    by_key: dict[str, list[float]] = {}
    for model in models:
        for name, value in distances(model, mean, distance, granularity).items():
            by_key.setdefault(name, []).append(value)
    del mean
    weights = {name: divergence_weights(values, rule, power) for name, values in by_key.items()}
    fused = MeanAccumulator()
    passed = 0
    for model in models:
        if passed < count:
            fused.add(model, {name: row[passed] for name, row in weights.items()}, f"model {passed}")
        passed += 1
    if passed != count or any(len(row) != count for row in weights.values()):
        raise UserError("the number of models changed between passes of aggregation: every pass must yield the same")
    return fused.result(), weights


def distance_weighted(
    weights: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    kind: Distance = "l2",
    granularity: Granularity = "tensor",
    power: float = 1.0,
) -> tuple[Weights, Weights]:
    """A site's terms of the two sums that give equation (2) without any site's model.

    The terms are relative to the mean, so that rounding them as fixed-point numbers moves the result less than the
    models are apart, however small the distances are.
    """
    result = {name: value**power for name, value in distances(weights, mean, kind, granularity).items()}
    weighted = {
        name: ((weights[name].double() - mean[name].double()) * value).to(weights[name].dtype)
        for name, value in result.items()
    }
    return Weights(weighted), Weights(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}
    )


def fused_from_sums(mean: Weights, weighted: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Weights:
    """``A_l + Σ d_l (G_l − A_l) / Σ d_l`` (2, 3); A_l where all distances are 0 or the tensor is of integers."""
    fused = {
        name: (mean[name].double() + weighted[name].double() / value.double()).to(mean[name].dtype)
        for name, value in total.items()
        if value.item() > 0
    }
    return mean.merge(fused)


def _distance(pairs: Sequence[tuple[Tensor, Tensor]], kind: Distance) -> float:
    """Distance between the concatenation of the first and of the second members of ``pairs``."""
    for tensor, mean in pairs:
        if tensor.shape != mean.shape:
            raise UserError(f"tensors of shapes {tuple(tensor.shape)} and {tuple(mean.shape)} have no distance")
    if kind == "l1":
        return _total((left - right).abs_().sum() for left, right in _pieces(pairs))
    if kind == "l2":
        return math.sqrt(_total(_square(left - right) for left, right in _pieces(pairs)))
    norms = [math.sqrt(_total(_square(piece[side]) for piece in _pieces(pairs))) for side in (0, 1)]
    if 0 in norms:
        return float(norms[0] != norms[1])
    # 1 − cos(a, b) = ½‖a/‖a‖ − b/‖b‖‖² is never negative, and precise for vectors that are almost parallel.
    half = 0.5 * _total(_square(left / norms[0] - right / norms[1]) for left, right in _pieces(pairs))
    return half if half > _COSINE_ROUNDING or math.isnan(half) else 0.0


def _pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor, mean in pairs:
        yield from float64_chunks(tensor, mean)


def _square(piece: Tensor) -> Tensor:
    return torch.dot(piece, piece)


def _total(parts: Iterable[Tensor]) -> float:
    # One .item() at the end, because each one waits for the accelerator.
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return 0.0 if total is None else total.item()
