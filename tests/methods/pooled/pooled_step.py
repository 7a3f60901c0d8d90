"""One step of a pooled baseline of domain generalization at a small pool, and the same step by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pooling import LEFT, assert_same, descend, trainable
from tiny import CNN, domains, federation, start_of
from torch import Tensor

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.weights import Weights

__all__ = ["LEFT", "assert_same", "descend", "trainable"]
SIZES = {"north": 16, "south": 8, "west": 24}
"""Every batch of a domain has 8 samples."""


def pool(method: Method, network: Mapping[str, object] = CNN, **options: Any) -> tuple[Site, Weights, Network]:
    """The pool of three sources, the common start, and a model with these weights."""
    where = federation(method, domains(network, SIZES), network, **{"momentum": 0.0, **options})
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, LEFT))
    weights = start_of(method, domains(network, SIZES), network)
    return site, weights, site.model(weights)


def mixed_batch(site: Site) -> Batch:
    """The first batch of this exchange, drawn from all domains together."""
    batch = next(site.batches(steps=1))
    site.mini_batches = site._orders = 0
    return batch


def domain_batches(site: Site) -> tuple[Batch, ...]:
    """The first batch of every domain in this exchange."""
    sources, _ = next(site.domain_batches(1))
    site.mini_batches = 0
    return sources


def step(method: Any, site: Site, weights: Weights, *, mini_batches: int = 1, steps: int = 1) -> Update:
    """So many steps of the method in this exchange."""
    site.plug_ins = site.plug_ins or method.calls.plug_ins(site)
    before = site.mini_batches
    update: Update = method.fit(site, weights, steps=steps * mini_batches)
    assert site.mini_batches == before + steps * mini_batches
    return update


def deepall_step(site: Site, weights: Weights, loss: Tensor, model: Network) -> Network:
    """The model after a step down ``loss``."""
    descend(loss, trainable(model))
    return model
