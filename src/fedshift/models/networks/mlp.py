"""Networks for vectors: tables, bags of words, frozen features. They flatten images."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from torch import nn

from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.wide import linear


class Mlp(NetworkOptions):
    """Fully connected hidden layers with ReLU, then a linear classifier.

    The default fits small tables. KD3A's network for Amazon Reviews, 5000-1000-500-100-2 (Feng et al., ICML 2021), is
    ``hidden: [1000, 500, 100]``. Stages: ``hidden1``, ``hidden2``, … (n, width), after ReLU and before dropout.
    """

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=100)] = Field(
        (64, 32), description="widths, first layer first"
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout after every hidden layer")
    batch_norm: bool = Field(False, description="BatchNorm before every ReLU")

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        stages: list[str] = []
        inputs = math.prod(input_shape)
        for number, width in enumerate(self.hidden, start=1):
            normalise = [nn.BatchNorm1d(width)] if self.batch_norm else []
            weighted = linear(inputs, width) if input_shape == (inputs,) else nn.Linear(inputs, width)
            layers[f"hidden{number}"] = nn.Sequential(weighted, *normalise, nn.ReLU())
            if self.dropout:
                layers[f"dropout{number}"] = nn.Dropout(self.dropout)
            stages.append(f"hidden{number}")
            inputs = width
        return Network(
            nn.Sequential(layers),
            nn.Linear(inputs, classes),
            embedding_size=inputs,
            classes=classes,
            stages={stage: f"features.{stage}" for stage in stages},
            alignment_stages=stages,
        )


class LinearHead(NetworkOptions):
    """A linear classifier on the inputs, for frozen features.

    Its only stage is ``input``, the inputs flattened to (n, d). No weights lie before it, so aligning it has no effect
    on training.
    """

    name: Literal["linear"] = "linear"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        inputs = math.prod(input_shape)
        return Network(
            nn.Flatten(),
            nn.Linear(inputs, classes),
            embedding_size=inputs,
            classes=classes,
            stages={"input": "features"},
            alignment_stages=("input",),
        )
