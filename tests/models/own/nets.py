"""Networks as users write them: each is called with input shape and classes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """Two convolutions, one pooling that is called twice, and a view that needs contiguous maps."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.LazyLinear(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.pool(F.relu(self.bn(self.conv1(images))))
        maps = self.pool(F.relu(self.conv2(maps)))
        scores: Tensor = self.head(self.drop(F.relu(self.hidden(maps.view(len(maps), -1)))))
        return scores


class Block(nn.Module):
    """Widens, weighs channels by a vector, and halves the map at its end."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.grow = nn.Conv2d(channels, 2 * channels, 1)
        self.squeeze = nn.Linear(2 * channels, 2 * channels)
        self.reduce = nn.Conv2d(2 * channels, channels, 3, stride=2, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        grown = self.grow(maps)
        reduced: Tensor = self.reduce(grown * self.squeeze(grown.mean((2, 3)))[..., None, None])
        return reduced


class Pyramid(nn.Module):
    """A stem and three blocks."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4), Block(4), Block(4))
        self.out = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.out(self.blocks(self.stem(images)))
        return scores


class Layer(nn.Module):
    """A transformer's layer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        wider: Tensor = tokens + self.mlp(tokens)
        return wider


class Tokens(nn.Module):
    """Blocks on sequences, all of one shape, as in a transformer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(input_shape[0], 8, 4, stride=4)
        self.layers = nn.ModuleList(Layer(8) for _ in range(6))
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        scores: Tensor = self.head(tokens.mean(1))
        return scores


class Volumes(nn.Module):
    """Convolutions in three dimensions."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(input_shape[0], 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv3d(3, 4, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(4, classes)

    def forward(self, volumes: Tensor) -> Tensor:
        scores: Tensor = self.head(self.second(self.first(volumes)).mean((2, 3, 4)))
        return scores


class Drawn(nn.Module):
    """Draws weights from three generators."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(input_shape[0], classes)
        with torch.no_grad():
            self.head.weight[0] = random.random()
            self.head.weight[1] = float(np.random.rand())  # noqa: NPY002

    def forward(self, vectors: Tensor) -> Tensor:
        scores: Tensor = self.head(vectors)
        return scores


class Strange(nn.Module):
    """A linear network whose end is ``kind``."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, kind: str) -> None:
        super().__init__()
        if kind == "raises":
            raise ValueError("no such kind\nmore lines")
        self.kind = kind
        self.first = nn.Linear(input_shape[0], classes if kind in ("twice", "tied") else 5)
        self.last = self.first if kind == "twice" else nn.Linear(self.first.out_features, classes)
        if kind == "tied":
            self.last.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, vectors: Tensor) -> Any:
        found = self.first(vectors)
        scores = self.last(found)
        ends: dict[str, Callable[[], Any]] = {  # only its own end runs: a layer that is called twice is no classifier
            "tuple": lambda: (scores, found),
            "narrow": lambda: scores[:, :-1],
            "classes": lambda: scores.argmax(1),
            "nan": lambda: scores / 0,
            "log_softmax": lambda: F.log_softmax(scores, 1),
            "dropout": lambda: self.drop(scores),
            "clipped": lambda: scores.clamp(min=-9),
            "skip": lambda: scores + self.first(vectors).sum(1, keepdim=True),
        }
        return ends.get(self.kind, lambda: scores)()


def made_of(input_shape: tuple[int, ...], classes: int, width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, classes))


def nothing(input_shape: tuple[int, ...], classes: int) -> str:
    return "a network"
