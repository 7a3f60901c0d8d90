"""The recipe: FedAvg with the means that measurement found to help at a site that nobody saw.

fedshift, 2026. No paper's method, but a choice among what docs/composition.md lists, made by leaving sources out;
benchmarks/recipe.md has the numbers, what did not help, and on which data it was chosen.

Setting: domain generalization, as FedAvg. The target is never seen in training. **For vectors and images in colour the
new site's samples, without labels, change how they are predicted there**: a table's number is of a site that predicts
its samples together.
Wire: FedAvg's, byte for byte.

    θ̄ = (1/K) Σ_k θ_k                               a site counts as any other, whatever its samples (``weighting``)
Where samples are images:
    x ← x under a random shear, scale and shift    every image of every mini-batch, by draws of its own
        in colour: sheared less, and with random brightness, contrast, saturation, and grey in a fifth of the draws
    m ← βm + (θ̄ − θ),  θ ← θ + m                   after the round, which began with θ
        β = 0.9 for images of one channel (``momentum``), 0.5 in colour (``colour_momentum``)
Where they are vectors, such as tables and frozen features (``dropout``):
    z ← z with each number set to 0 with probability ½, the others doubled; z is what the classifier reads, in training
    the model that is handed out is the mean of the last quarter of rounds (``averaged``)
Where they are vectors or images in colour:
    w_k ← (1 − s)·w_k/‖w_k‖ + s·mean(z/‖z‖), no bias     at the new site, n of its samples together (``templates``);
        z: of the surest half of those predicted as k; s = n/(n + 16·C); all w_k of one norm    (T3A, NeurIPS 2021)

Of all these, volumes (n, c, d, h, w) have equal shares and momentum.

A site tells images and their channels by their shape; the server, which sees no samples, by the first convolution.

What the parts are worth (benchmarks/recipe.md): on Rotated MNIST, six unseen angles, three seeds, it has 98.2 where
FedAvg has 90.3, and pooled training on such images 99.4. At M0, one seed, FedAvg with as many exchanges has 84.5,
momentum alone 87.8, moved images alone 93.7. On PACS images (64 px, two seeds) it has 54.5, FedAvg 47.7. On vectors
the turned classifier, which reads the target's samples, is worth nearly all, on SURF equal shares as much: over FedAvg
+5.5 on PACS features (p = 0.366), +5.0 on SURF (p = 0.820), +0.2 on Amazon Review (p = 0.060), +0.2 on heart disease
(p = 1.000). None is shown over targets, and all of these data sets had a part in its choice, of the angles M0 and M15.
Over FedAvg of equal shares whose classifier is turned likewise it has +0.13 (p = 1.000) and +0.22 (p = 0.820).

Where it fails
* A turned classifier, where one class is nearly all that a site has: −2.2 at Switzerland, where 93 % are ill.
* Where samples of several sites are predicted together, they are taken for one site.
* Where a small site is unlike all others, equal shares cost: −0.7 when hospitals were left out; ``weighting: samples``.
* Where a sheared, scaled or shifted image belongs to another class, or images show no shapes, and where colour tells
  classes: ``augmentation: none``, in colour ``colour_augmentation: none``.
* Momentum: on letters that no site draws alike it fell below FedAvg on the same images in 40 rounds, 64.7 to 70.7 (one
  seed), and in 13 rounds it is 12.1 below pooled training on them. ``setting: ahead``, for images, is 6.1 below it
  and at no site below FedAvg; in 40 rounds above it (one seed), and 0.1 below FedAvg at one site, elsewhere above.
* Where pooled training on the same images is to be met: 1.2 points are missing on Rotated MNIST. With ``setting:
  four_exchanges``, for images, it is 0.2, and on the letters in 13 rounds 4.6, for four times the bytes; where pooled
  training falls far below FedAvg, as at one of the letters' sites, this does by 5.2.

Should reproduce: no published table. With ``augmentation: none``, ``momentum: 0``, the same for
colour, ``dropout: 0`` and ``averaged: 0`` it trains as FedAvg of equal shares; with ``templates: null`` it predicts as
that, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from fedshift.data.domain import ALL_TASKS
from fedshift.data.transforms import Augmentation, NamedAugmentation
from fedshift.methods.base import Samples
from fedshift.methods.composition.averages import SWA
from fedshift.methods.composition.options import AtServer, AtSites
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.composition.regularisers import DropoutOption, Rate
from fedshift.methods.composition.views import AugmentOption
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.server import Beta, Momentum
from fedshift.weights import Weights

SHAPES = Augmentation(shear=0.5, scale=0.1, shift=0.04)
COLOURS = Augmentation(shear=0.2, scale=0.1, shift=0.04, brightness=0.3, contrast=0.3, saturation=0.3, greyscale=0.2)


class Recipe(FedAvg):
    """A preset: FedAvg with what helps at an unseen site. For images they are moved images and momentum of the server,
    for vectors dropout and a classifier that the new site turns towards its own samples."""

    traits = FedAvg.traits.derive(
        name="recipe",
        citation="fedshift 2026",
        group="unseen",
        advice="For images: 98.19 on Rotated MNIST, where pooled training on the same moved images has 99.43, and "
        "fedavg on images as they are, in a fifth of the exchanges, 90.32. On vectors and colour images it "
        "reads the new site's unlabelled samples, and no gain over FedAvg is shown over targets: +6.81 on "
        "PACS images (p = 0.067), +5.46 on their features (p = 0.366), +5.01 on SURF (p = 0.820), +0.20 on "
        "heart disease (p = 1.000).",
        settings={
            "ahead": {"server": {"optimizer": "momentum", "beta": 0.7, "rate": 1.0, "nesterov": True}},
            "four_exchanges": {
                "server": {"optimizer": "momentum", "beta": 0.85, "rate": 1.0, "nesterov": True},
                "exchanges_per_epoch": 4,
            },
        },
        tasks=ALL_TASKS,
        tests=MethodTests(
            options={
                "augmentation": tries("none", {"shear": 0.2}),
                "momentum": tries(0.0, 0.5),
                "dropout": tries(0.0, 0.3, where="mlp"),
            },
            elsewhere={
                "averaged": (0.0,),
                "templates": (None,),
                "colour_augmentation": ("none",),
                "colour_momentum": (0.0,),
            },
        ),
    )

    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares 1/K, or FedAvg's N_k/ΣN")
    augmentation: NamedAugmentation = Field(
        SHAPES, description="how images of one channel are changed: a preset's name, its parts, or none"
    )
    colour_augmentation: NamedAugmentation = Field(COLOURS, description="the same for images of several channels")
    momentum: Beta = Field(0.9, description="β of the server's step for images of one channel, unless `server` is set")
    colour_momentum: Beta = Field(0.5, description="the same for images of several channels")
    averaged: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25,
        description="without convolutions the mean of this share of the rounds, the last, is handed out; 0: the last",
    )
    dropout: Rate = Field(0.5, description="share of the features left out in training where samples are vectors")
    templates: NonNegativeInt | None = Field(
        16,
        description="for vectors and images in colour: N of `classifier_at_new_site`, unless that is set; none: the "
        "trained classifier",
    )

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        told = super().check_samples(samples)
        if not samples.tokens:
            return told
        return (
            *told,
            "recipe: on tokens it is that for vectors: dropout before the classifier, the mean of the last rounds, a "
            "classifier turned at the new site; it changes no text, and was measured on none",
        )

    def at_sites(self, input_shape: tuple[int, ...]) -> AtSites:
        """Its own parts for samples of this shape, before those of ``local``; what an option names takes its place."""
        given, kind = super().at_sites(input_shape), _kind(input_shape)
        named = {plug_in.name for plug_in in given.local}
        added = tuple(plug_in for plug_in in self._plug_ins(kind) if plug_in.name not in named)
        turned = kind in _TURNED and given.new_site.classifier is None
        new_site = replace(given.new_site, classifier=self.templates) if turned else given.new_site
        return AtSites((*added, *given.local), new_site)

    def _plug_ins(self, kind: str) -> tuple[LocalOption, ...]:
        if kind == "vectors":
            return (DropoutOption(rate=self.dropout),) if self.dropout else ()
        by = {"grey": self.augmentation, "colour": self.colour_augmentation}.get(kind)
        return () if by is None or by.is_identity else (AugmentOption(by=by),)

    def at_server(self, model: Weights) -> AtServer:
        """Momentum where the network reads images, elsewhere a mean of the last rounds, unless options say another."""
        given, channels = super().at_server(model), _channels(model)
        if channels is not None:
            beta = self.momentum if channels == 1 else self.colour_momentum
            return replace(given, optimizer=given.optimizer or (Momentum(beta=beta) if beta else None))
        chosen = self.average is not None or self.average_rounds > 1 or self.averaged == 0
        return given if chosen else replace(given, average=SWA(start=1 - self.averaged))


_TURNED = ("vectors", "colour", "others")
"""Kinds of samples for which the classifier is turned at a new site."""


def _kind(input_shape: tuple[int, ...]) -> str:
    """What samples of this shape are."""
    if len(input_shape) == 3:
        return "grey" if input_shape[0] == 1 else "colour"
    return {1: "vectors", 4: "volumes"}.get(len(input_shape), "others")


def _channels(model: Weights) -> int | None:
    """How many channels the first convolution reads; None: the network has none, so it reads no images."""
    return next((tensor.shape[1] for tensor in model.values() if tensor.dim() in (4, 5)), None)
