"""CSAC's alignment loss at a site: the frozen reference, the projections of both sides, attention and MMD (6–10)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.mmd import cross_multi_kernel_mmd, multi_kernel_mmd
from fedshift.functional.projection import projection_layer
from fedshift.models.network import Network

if TYPE_CHECKING:
    from fedshift.methods.federated.csac import CSAC

CACHED_FEATURES = 1 << 30
"""Bytes of frozen features that a site keeps rather than computes again in every epoch."""


class Aligner(nn.Module):
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


def _height_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a stage's map: a volume's without its depth; a sequence is of height 1."""
    if len(shape) == 1:
        return 1, 1
    height, width = (1, *shape[1:])[-2:]
    return height, width
