"""Networks with one more block or several classifiers, whose new weights follow from the network's own; and a model
with the BatchNorm statistics of one site."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedshift.federation.federation import Federation
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Site
from fedshift.models.network import Network
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
    """``network`` with a block behind its features, and perhaps another classifier. Modules are shared, not copied.

    block: makes the block for features of a given width. size: the width of what it puts out. classifier: makes a
    classifier from width and classes; none = the network's own, which needs ``size`` to be the width it reads. names:
    of the two parts of the features.

    New weights are drawn from a seed that the network's own classifier gives: they differ between the seeds of an
    experiment, and every process finds the same.
    """
    first = [float(value) for value in next(network.classifier.parameters()).detach().flatten()[:8]]
    inner, outer = names
    with drawn_from(derive_seed(outer, *first)):
        features = nn.Sequential(OrderedDict([(inner, network.features), (outer, block(network.embedding_size))]))
        made = network.classifier if classifier is None else classifier(size, network.classes)
    return Network(
        features,
        made,
        embedding_size=size,
        classes=network.classes,
        stages={name: path.replace("features", f"features.{inner}", 1) for name, path in network.stages.items()},
        alignment_stages=network.alignment_stages,
    )


class Experts(nn.Module):
    """One classifier per source domain on common features; together they answer with the mean of their softmax."""

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def probabilities(self, features: Tensor) -> Tensor:
        """Every head's probabilities, (K, n, C)."""
        return torch.stack([head(features) for head in self.heads]).softmax(2)

    def forward(self, features: Tensor) -> Tensor:
        """The logarithm of the mean probabilities, (n, C): its softmax is the mean."""
        each = torch.stack([head(features) for head in self.heads]).log_softmax(2)
        return each.logsumexp(0) - torch.tensor(float(len(self.heads))).log()


def with_experts(network: Network, number: int) -> Network:
    """The network with so many classifiers, the first of which is its own; the others have weights of their own.

    Those follow from the first one's weights: the experiment's seed is in them, and every process finds the same.
    """
    own = network.classifier
    first = [float(value) for value in next(own.parameters()).detach().flatten()[:8]]
    heads = [own, *(redrawn(own, derive_seed("expert", head, *first)) for head in range(1, number))]
    return Network(
        network.features,
        Experts(heads),
        embedding_size=network.embedding_size,
        classes=network.classes,
        stages=network.stages,
        alignment_stages=network.alignment_stages,
    )


def redrawn(module: M, seed: int | None = None) -> M:
    """A copy of a module with fresh weights: of ``seed``, or of torch's generator as it stands."""
    fresh = copy.deepcopy(module)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        for layer in fresh.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    return fresh


def with_own_statistics(site: Site, weights: Weights) -> Network:
    """The model in evaluation mode, BatchNorm's statistics measured on this site's data."""
    model = site.model(weights).eval()
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not layers or site.samples < 2:
        return model
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over batches
        layer.train()
    with torch.no_grad():
        for batch in site.all_batches():
            if len(batch.inputs) > 1:
                model(batch.inputs)
    return model.eval()


def hand_over(
    federation: Federation, givers: Sequence[str], takers: Sequence[str], part: float = 1.0
) -> dict[str, int]:
    """Let ``takers`` train ``part`` of what ``givers`` would in this round, so that work stays equal in all.

    Returns by how many mini-batches this round differs from the plan at each site; takers part them evenly.
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
