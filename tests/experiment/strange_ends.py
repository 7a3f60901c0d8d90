"""Networks whose scores are not what their last layer gives, and others that are hard to make again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class End(nn.Module):
    """Two linear layers, and something behind them, by ``kind``."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, kind: str) -> None:
        super().__init__()
        self.kind, self.classes = kind, classes
        self.first, self.last = nn.Linear(input_shape[0], 8), nn.Linear(8, classes)
        self.norm, self.factor = nn.LayerNorm(classes), nn.Parameter(torch.ones(classes))
        self.register_buffer("prior", torch.linspace(0.1, 0.3, classes))

    def forward(self, vectors: Tensor) -> Tensor:
        scores: Tensor = self.last(F.relu(self.first(vectors)))
        ends: dict[str, Any] = {
            "log_softmax": lambda: F.log_softmax(scores, 1),
            "softmax": lambda: scores.softmax(1),
            "sigmoid": scores.sigmoid,
            "tanh": scores.tanh,
            "relu": lambda: F.relu(scores + 9),
            "scale": lambda: 3 * scores,
            "scale_where_it_predicts": lambda: scores if self.training else 3 * scores,
            "learned_scale": lambda: scores * self.factor,
            "clamp": lambda: scores.clamp(-30, 30),
            "in_place_relu": lambda: scores.add_(9).relu_(),
            "in_place_scale": lambda: scores.mul_(2),
            "in_place_shift": lambda: scores.add_(self.prior),
            "view": lambda: scores.view(-1, self.classes, 1).squeeze(2),
            "chunk": lambda: torch.cat(scores.chunk(2, 1), 1),
            "flip": lambda: scores.flip(1),
            "norm": lambda: self.norm(scores),
            "prior": lambda: scores + self.prior.log(),
            "dropout": lambda: F.dropout(scores, 0.5, self.training),
            "contiguous": scores.contiguous,
            "bfloat16": lambda: scores.bfloat16().float(),
        }
        gave: Tensor = ends[self.kind]()
        return gave


class Reads(nn.Module):
    """Its constructor reads values of tensors, by ``kind``."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, kind: str) -> None:
        super().__init__()
        width = {
            "item": lambda: int(torch.linspace(0, 8, 3)[-1].item()),
            "tolist": lambda: int(torch.arange(9).tolist()[-1]),
            "numpy": lambda: int(torch.full((1,), 8.0).numpy()[0]),
            "branch": lambda: 8 if torch.ones(()) > 0 else 3,
            "nonzero": lambda: int(torch.ones(8).nonzero().shape[0]),
            "cpu": lambda: int(torch.zeros(8, device="cpu").sum().item()) + 8,
        }[kind]()
        self.drop = nn.Dropout(torch.linspace(0, 0.1, 2)[1].item())
        self.first, self.last = nn.Linear(input_shape[0], width), nn.Linear(width, classes)

    def forward(self, vectors: Tensor) -> Tensor:
        scores: Tensor = self.last(self.drop(torch.relu(self.first(vectors))))
        return scores


class Unfit(nn.Module):
    """Cannot train, by ``kind``."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(3, 8, sparse=kind == "sparse")
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64 if kind == "complex" else torch.float32))
        self.first, self.last = nn.Linear(input_shape[0], 8), nn.Linear(8, classes)

    def forward(self, vectors: Tensor) -> Any:
        inner = self.first(vectors)
        if self.kind in ("sparse", "tokens"):
            inner = self.embedding(vectors.abs().long()).mean(1)
        if self.kind == "complex":
            inner = (inner.to(torch.complex64) @ self.weight).abs()
        if self.kind == "in_place":
            inner = inner.exp()
            inner.mul(inner)
            inner.add_(1)
        if self.training and self.kind == "raises":
            raise KeyError("no such\nkey")
        if self.training and self.kind == "features_tuple":
            return inner, inner
        if self.kind == "detached":
            return self.last(inner).softmax(1).detach()
        scores = self.last(inner)
        others = {
            "tuple": (scores, inner),
            "dict": {"logits": scores},
            "list": [scores],
            "none": None,
            "sum": scores.sum(),
        }
        return others.get(self.kind, scores) if self.training else scores
