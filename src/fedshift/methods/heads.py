"""Changes of networks that several methods use: a further block, several classifiers, a site's BatchNorm statistics."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedshift.data.tasks.objective import CLASSES, Objective
from fedshift.federation.federation import Federation
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Site
from fedshift.models.network import Network
from fedshift.models.normalisation import adapted_to
from fedshift.weights import Weights

M = TypeVar("M", bound=nn.Module)


def with_block(
    network: Network,
    block: Callable[[int], nn.Module],
    *,
    size: int,
    classifier: Callable[[int, int], nn.Module] | None = None,
    names: tuple[str, str] = ("backbone", "block"),
) -> Network:
    """``network`` with a block after its features, and with another classifier if one is given.

    New weights are drawn from the network's seed and the block's name. So they differ between the seeds of an
    experiment, and every process draws the same ones on any processor.

    ``network``: its modules are shared with the result, not copied. ``block``: makes the block from the width of the
    features. ``classifier``: makes a classifier from width and classes. None: the network's own, which must read
    ``size``. ``names``: names of the old features and of the block inside the new features. Returns the new network;
    its stages are those of ``network``.
    """
    inner, outer = names
    with drawn_from(derive_seed(network.seed, "block", outer)):
        features = nn.Sequential(OrderedDict([(inner, network.features), (outer, block(network.embedding_size))]))
        made = network.classifier if classifier is None else classifier(size, network.classes)
    return network.with_parts(features, made, embedding_size=size, moved_to=inner)


class Experts(nn.Module):
    """One classifier per source domain on common features. They answer together: with the mean of their softmax."""

    def __init__(self, heads: Iterable[nn.Module], objective: Objective = CLASSES) -> None:
        super().__init__()
        self.objective = objective
        self.heads = nn.ModuleList(heads)

    def probabilities(self, features: Tensor) -> Tensor:
        """Every head's probabilities, (K, n, C)."""
        return torch.stack([head(features) for head in self.heads]).softmax(2)

    def forward(self, features: Tensor) -> Tensor:
        """What they say together, (n, C). For classes its softmax is the mean of their probabilities."""
        return self.objective.together(torch.stack([head(features) for head in self.heads]))


def with_experts(network: Network, number: int) -> Network:
    """``network`` with one classifier per source domain.

    The first one is the network's own. The others are drawn from the network's seed and their number, so every process
    draws the same ones on any processor.

    ``network``: its modules are shared with the result, not copied. Returns the network with `Experts` as its
    classifier.
    """
    classifier = network.classifier
    others = (redrawn(classifier, derive_seed(network.seed, "expert", head)) for head in range(1, number))
    return network.with_parts(network.features, Experts([classifier, *others], network.objective))


class Dropout(nn.Dropout):
    """Dropout that draws its numbers in less than half the time: the same numbers, and so the same results."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs of which a share p is 0 in training, and the others divided by 1 − p."""
        if not self.training or self.inplace or not 0 < self.p < 1 or inputs.device.type != "cpu":
            return super().forward(inputs)
        kept = 1 - self.p
        # What Tensor.bernoulli_ draws, which takes 2.3 times as long.
        drawn = torch.rand(inputs.shape, dtype=torch.float64) < kept
        return inputs * (drawn.to(inputs.dtype) / kept)


def redrawn(module: M, seed: int | None = None) -> M:
    """A copy of a module with fresh weights.

    ``module``: what is copied; it does not change. ``seed``: what the weights are drawn from. None: torch's generator
    in its current state. Returns the copy.
    """
    fresh = copy.deepcopy(module)
    with nullcontext() if seed is None else drawn_from(seed):
        for layer in fresh.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    return fresh


def with_own_statistics(site: Site, weights: Weights) -> Network:
    """The model in evaluation mode, with BatchNorm statistics of this site's samples in place of the trained ones."""
    return adapted_to(site.model(weights), (batch.inputs for batch in site.all_batches(mixed=True)), prior=0)


def hand_over(
    federation: Federation, givers: Sequence[str], takers: Sequence[str], part: float = 1.0
) -> dict[str, int]:
    """Move budget of this round from some sites to others, so that the total stays equal.

    ``takers``: sites that train more. They share evenly what the givers lose. ``part``: share of the givers'
    mini-batches of this round that is moved. Returns site → change of its mini-batches.
    """
    rounds_left = max(1, federation.rounds - federation.round + 1)
    changes: dict[str, int] = {}
    for site in givers:
        left = max(0, federation.budget[site] - federation.progress.used[site])
        changes[site] = -math.floor(part * -(-left // rounds_left))
    given = -sum(changes.values())
    changes |= {site: (given + number) // len(takers) for number, site in enumerate(takers)}
    for site, change in changes.items():
        federation.budget[site] += change
    return changes


@torch.no_grad()
def confident_pseudo_labels(expert_probabilities: Tensor, threshold: float = 0.95) -> tuple[Tensor, Tensor]:
    """Class of the most confident expert for every sample, and whether it is sure enough (DAEL): (K, b, C) → (b,)."""
    # The most confident expert's best class is the best class over all experts.
    confidence, labels = expert_probabilities.amax(0).max(1)
    return labels, confidence >= threshold


def unlabelled_ensemble_loss(
    expert_probabilities_strong: Tensor, labels: Tensor, mask: Tensor, epsilon: float = 1e-5
) -> Tensor:
    """Loss on pseudo-labels, ``−E[m · log(mean_k p_k(strong view)_ŷ + ε)]``, a scalar in nats (DAEL's L_u).

    E is the mean over all b samples, those with m = 0 included. So a batch with few sure labels counts little.
    """
    return (mask * expert_cross_entropy(expert_probabilities_strong.mean(0), labels, epsilon)).mean()


def expert_cross_entropy(probabilities: Tensor, labels: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Cross-entropy of probabilities, ``−log(p_y + ε)`` of each sample, in nats.

    The mean for each expert on its own domain, averaged over experts, is DAEL's L_x.
    """
    return -(probabilities.gather(1, labels[:, None]).squeeze(1) + epsilon).log()
