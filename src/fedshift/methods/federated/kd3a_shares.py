"""KD3A's shares of sources and target in a round, by consensus focus or by what the paper compares it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Site
from fedshift.functional import source_weights
from fedshift.functional.batchnorm import batchnorm_distance
from fedshift.functional.clustering import dispersion
from fedshift.methods.heads import with_own_statistics
from fedshift.weights import Weights

Focus = Literal["shapley", "leave_one_out", "samples", "h_divergence", "information_gain"]


class Models(NamedTuple):
    """The models of a round: θ, the sources' models as received and as aggregated, and N_k."""

    start: Weights
    came: Mapping[str, Weights]
    merged: Mapping[str, Weights]
    samples: Mapping[str, int]


def of_round(
    site: Site, focus: Focus, models: Models, value: Tensor | None, confident: float | None
) -> dict[str, float]:
    """The shares of a round.

    Args:
        site: the target.
        focus: how sources are weighted.
        models: the models of the round.
        value: consensus focus of each source (K,); None for another ``focus``.
        confident: the share of the target's samples on which a teacher is confident, for the released code's α_T. None:
            α_T is N_T/(ΣN + N_T).

    Returns:
        α of every source and, under the site's own name, of the target. They sum to 1.
    """
    counts = list(models.samples.values())
    if value is None:
        target = site.samples / (sum(counts) + site.samples) if confident is None else confident / (len(counts) + 1)
        sources = [(1 - target) * share for share in _without_value(site, focus, models, counts)]
    elif confident is None:
        sources, target = source_weights.domain_weights(value, counts, site.samples)
    else:
        sources, target = source_weights.released_domain_weights(value, confident)
    return {**dict(zip(models.samples, sources, strict=True)), site.name: target}


def _without_value(site: Site, focus: Focus, models: Models, counts: Sequence[int]) -> list[float]:
    """Shares among the sources by one of the weightings that consensus focus is compared with."""
    if focus == "samples":
        return source_weights.sample_weights(counts)
    if focus == "h_divergence":  # as received: after aggregation they may hold the target's statistics
        return by_distance(site, list(models.came.values()), counts)
    return by_gain(site, models.start, list(models.merged.values()))


def by_distance(site: Site, models: Sequence[Weights], samples: Sequence[int]) -> list[float]:
    """H-divergence: α_k ∝ N_k exp(−d_k).

    d_k is the distance per channel between a source's BatchNorm statistics and those of the target's data under its
    model.
    """
    own = (site.weights_of(with_own_statistics(site, model)) for model in models)
    distances = [batchnorm_distance(*pair, per_channel=True) for pair in zip(models, own, strict=True)]
    return source_weights.distance_weights(samples, distances)


def by_gain(site: Site, before: Weights, models: Sequence[Weights]) -> list[float]:
    """FADA's information gain: α is the softmax of the relative gains.

    A gain is how much tighter the target's features cluster under a model than under ``before``, as a ratio.
    """
    gains = source_weights.relative_gains(_dispersion(site, before), [_dispersion(site, model) for model in models])
    return source_weights.gain_weights(gains)


@torch.no_grad()
def _dispersion(site: Site, weights: Weights) -> float:
    """The dispersion of the target's features around their cluster centres under a model."""
    model = site.model(weights).eval()
    features = torch.cat([model.features(batch.inputs).flatten(1) for batch in site.all_batches()])
    return dispersion(features, site.classes, derive_seed(site.seed))


def smoothed(previous: Mapping[str, float], new: Mapping[str, float], momentum: float) -> dict[str, float]:
    """Shares averaged over rounds. A site that was missing in the last round starts with its new share."""
    before = [previous.get(name, share) for name, share in new.items()]
    mixed = source_weights.smoothed_weights(before, list(new.values()), momentum)
    return {name: share / sum(mixed) for name, share in zip(new, mixed, strict=True)}
