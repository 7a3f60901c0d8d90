"""Triplets over a queue of keys: the metric learning of EISNet (see `methods.pooled.eisnet`)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.federation.site import Batch, LossOf, PlugIn, Site
from fedshift.functional.clustering import squared_distances
from fedshift.methods.composition.mean_teacher import MeanTeacher
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.models.network import Network


class TripletsOption(LocalOption):
    """EISNet's metric learning (Wang et al., ECCV 2020): triplets over a queue of keys, which a momentum copy makes.

    Head, copy and queue stay at their site: the keys of its own samples are compared.
    """

    tasks = ("classification",)
    memory_names = ("triplets", "triplets_optimizer")
    cost = 1.5

    name: Literal["triplets"] = "triplets"
    weight: NonNegativeFloat = Field(0.5, description="β")
    embedding: PositiveInt = Field(128, description="width of the embedding")
    queue: PositiveInt = Field(1024, description="K: keys that are kept")
    hard_negatives: PositiveInt = Field(256, description="k: semi-hard negatives that are drawn for a pair, at most")
    margin: NonNegativeFloat = Field(2.0, description="ξ")
    momentum: Annotated[float, Field(ge=0, le=1)] = Field(0.999, description="m of the key encoder")

    def at(self, site: Site) -> PlugIn:
        return _Triplets(site, self)


class _Triplets(PlugIn):
    name = "triplets"
    head: KeyQueue | None

    def __init__(self, site: Site, option: TripletsOption) -> None:
        super().__init__(site)
        self._option = option
        self._stepped = False
        self._draws = site.generator_for("triplets")

    def make_head(self, model: Network) -> nn.Module:
        option = self._option
        return KeyQueue(model, option.embedding, option.queue, option.momentum)

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        model, head, option = self.model, self.head, self._option
        assert model is not None
        assert head is not None
        self._follow()
        self._stepped = True
        features = model.features(batch.inputs)
        keys = head.enqueue(batch.inputs, batch.targets)
        apart = head.triplet_loss(features, keys, batch.targets, option.margin, option.hard_negatives, self._draws)
        return loss_of(batch) + option.weight * apart

    def end(self) -> None:
        self._follow()
        super().end()

    def _follow(self) -> None:
        """A step of the key encoder after every step of the model."""
        if self._stepped and self.model is not None and self.head is not None:
            self.head.follow(self.model)


class KeyQueue(nn.Module):
    """The embedding head, the key encoder and the queue of keys."""

    keys: Tensor
    labels: Tensor

    def __init__(self, model: Network, width: int, capacity: int, momentum: float) -> None:
        super().__init__()
        features = model.embedding_size
        self.embed = nn.Linear(features, width)
        self.encoder = MeanTeacher(nn.Sequential(model.features, self.embed), momentum, warm_up=False)
        self.capacity = capacity
        self.register_buffer("keys", torch.zeros(0, width))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64))

    def triplet_loss(
        self, features: Tensor, keys: Tensor, labels: Tensor, margin: float, number: int, draws: torch.Generator
    ) -> Tensor:
        """EISNet (4) of the model's features of a batch, whose keys are in the queue."""
        result = F.normalize(self.embed(features))
        return momentum_triplet_loss(result, keys, labels, self.keys, self.labels, margin, number, draws)

    def follow(self, model: Network) -> None:
        """One step of the key encoder."""
        self.encoder.follow(nn.Sequential(model.features, self.embed))

    def enqueue(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Add the keys of a batch, which are returned; the oldest leave. The encoder is in evaluation mode."""
        new = F.normalize(self.encoder.eval()(inputs))
        self.keys = torch.cat([self.keys, new])[-self.capacity :]
        self.labels = torch.cat([self.labels, labels])[-self.capacity :]
        return new

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for name in ("keys", "labels"):  # as many as there were
            setattr(self, name, torch.empty_like(state[f"{prefix}{name}"]))
        super()._load_from_state_dict(state, prefix, *rest)


def momentum_triplet_loss(
    queries: Tensor,
    keys: Tensor,
    labels: Tensor,
    queue: Tensor,
    queue_labels: Tensor,
    margin: float,
    number: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean of ``max(0, ‖q − p‖² − ‖q − n‖² + ξ)`` over the triplets of a batch and a queue of keys.

    A positive pair is a query and the key of a *later* sample of the batch of its class. Its negatives are drawn among
    the `semi_hard` keys of the queue, as often as there are such keys but at most k times, with repetition.

    Source: EISNet (Wang et al., ECCV 2020, equation 4) as its code has it (EmmaW8/EISNet,
    code/utils/anchor_selector.py, KSemihardNegativeTripletSelectorFromMomentum).
    """
    i, j = ((labels[:, None] == labels[None]).triu(1)).nonzero().T
    positive = squared_distances(queries, keys)[i, j][:, None]
    other = squared_distances(queries, queue)[i]
    with torch.no_grad():
        result = semi_hard(positive, other, margin) & (labels[i][:, None] != queue_labels[None])
        times = (
            result.to(other.dtype) if generator is None else drawn_with_repetition(result, number, generator).to(other)
        )
    losses = (positive - other + margin).clamp_min(0)
    return (losses * times).sum() / times.sum().clamp_min(1)


def semi_hard(positive: Tensor, other: Tensor, margin: float) -> Tensor:
    """Which negatives are farther than the positive, but within the margin: ``0 < d_p − d_n + ξ < ξ``."""
    return (other > positive) & (positive - other + margin > 0)  # not by the gap alone, which may round to the margin


def drawn_with_repetition(allowed: Tensor, number: int | None, generator: torch.Generator) -> Tensor:
    """How often each entry is drawn: in each row as many draws as there are entries, at most ``number``."""
    chances = allowed.cpu().float()
    sizes = chances.sum(1)
    times = torch.zeros_like(chances)
    rows = sizes.nonzero().flatten()
    draws = sizes if number is None else sizes.clamp_max(number)
    if len(rows):
        most = int(draws.max())
        chosen = torch.multinomial(chances[rows], most, replacement=True, generator=generator)
        counted = (torch.arange(most)[None] < draws[rows][:, None]).float()
        times[rows] = torch.zeros_like(chances[rows]).scatter_add_(1, chosen, counted)
    return times.to(allowed.device)
