"""CSAC's alignment loss at a site: the frozen reference, the projections of both sides, attention and MMD (6–10)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor, nn

from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.mmd import multi_kernel_mmd, weighted_multi_kernel_mmd
from fedshift.functional.projection import Reduction, projection_layer
from fedshift.models.network import Network

CACHED_FEATURES = 1 << 30
"""Bytes of frozen features that a site keeps rather than computes again in every epoch."""


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

        Args:
            fused: projected stages of the fused model, (|R|, n, c, g, w).
            local: those of the frozen local model, likewise.
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
