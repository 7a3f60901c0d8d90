"""One step of a pooled baseline of domain adaptation, and the same step by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny import MLP, domains, federation, start_of
from torch import Tensor, nn

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.methods.base import Method
from fedshift.weights import Weights

SIZES = {"north": 9, "south": 8, "west": 11}
LR = 0.05
LEFT = 400
"""Mini-batches that the pool has left when a step begins."""


def pool_of(
    method: Method, network: Mapping[str, object] = MLP, sizes: Mapping[str, int] = SIZES, **options: Any
) -> Site:
    """The pool of ``sizes`` sources and a target of 14 samples, without momentum unless asked for."""
    where = federation(method, domains(network, sizes), network, **{"momentum": 0.0, **options})
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, LEFT))
    return site


def start(method: Method, network: Mapping[str, object] = MLP, sizes: Mapping[str, int] = SIZES) -> Weights:
    return start_of(method, domains(network, sizes), network)


def first_batches(site: Site) -> tuple[tuple[Batch, ...], Batch]:
    """The batches of the first step of this exchange."""
    sources, target = next(site.domain_batches(1))
    site.mini_batches = 0
    assert target is not None
    return sources, target


def fit(method: Any, site: Site, weights: Weights, steps: int = 1) -> Update:
    """``steps`` steps of the method, in this exchange."""
    before, work = site.mini_batches, steps * (site.domains + (site.unlabelled is not None))
    update: Update = method.fit(site, weights, steps=work)
    assert site.mini_batches == before + work
    return update


def descend(loss: Tensor, parameters: Sequence[nn.Parameter], lr: float = LR) -> None:
    """One step down the gradient by hand; what the loss does not depend on stays."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= lr * gradient


def assert_same(found: Mapping[str, Tensor], module: nn.Module) -> None:
    expected = module.state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The names of the tensors that changed."""
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def trainable(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def binary(logits: Tensor, value: float) -> Tensor:
    """Mean cross-entropy of ``sigmoid(logits)`` for samples that are all 1 or all 0."""
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))
