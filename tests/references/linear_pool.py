"""A pool of linear networks in float64 with given weights and mini-batches: where authors' steps are taken again."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from tiny import LINEAR, domains, federation
from torch import Tensor, nn

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.weights import Weights

LEFT = 10**9
"""Mini-batches that the pool has left: so many that a run has just begun."""


def linear(weight: Tensor) -> nn.Linear:
    """A layer x → W x."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def network(features: nn.Module, classifier: nn.Module, width: int, classes: int) -> Network:
    """A network of these parts."""
    return Network(features, classifier, embedding_size=width, classes=classes, stages={}, alignment_stages=())


def batch(inputs: Tensor, labels: Sequence[int] | None, domain: int | Sequence[int] = 0) -> Batch:
    """A mini-batch of one domain, or with the domain of each sample."""
    return Batch(
        inputs,
        None if labels is None else torch.tensor(labels),
        torch.full((len(inputs),), domain) if isinstance(domain, int) else torch.tensor(domain),
        torch.arange(len(inputs)),
    )


def pool(
    method: Method,
    model: Network,
    batches: Sequence[Batch],
    rate: float,
    *,
    parts: nn.Module | None = None,
    optimizer: str = "sgd",
) -> tuple[Site, Weights]:
    """A pool of three domains that trains with plain SGD or Adam, and the weights of ``model``.

    Args:
        method: Which is about to train.
        model: The network that the pool has.
        batches: Those of the next step, one of each domain, or one of all.
        rate: Of learning.
        parts: What trains beside the model.
        optimizer: Of the experiment.
    """
    sizes = {"north": 30, "south": 20, "west": 10}
    where = federation(
        method, domains(LINEAR, sizes), LINEAR, momentum=0.0, weight_decay=0.0, lr=rate, optimizer=optimizer
    )
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, LEFT))
    site.model = lambda weights=None: copy.deepcopy(model).train()  # type: ignore[method-assign, assignment]
    site.domain_batches = lambda steps, split: iter([(tuple(batches), None)])  # type: ignore[method-assign]
    site.batches = lambda epochs=1, steps=None: iter(batches)  # type: ignore[method-assign]
    if parts is not None:
        site.memory["parts"] = site.weights_of(parts)
    return site, site.weights_of(model)
