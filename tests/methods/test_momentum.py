"""Momentum that a site keeps from round to round, where the experiment asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_contract import method_of, run
from tiny import CNN, MLP, normed_for, vectors

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.federated.alone import Alone
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.pooled.deepall import DeepAll

KEEPS = [name for name in registry.names() if "optimizer" in registry.method_class(name)().memory_names]


@pytest.mark.parametrize("method", [FedAvg(), FedProx(proximal_weight=0.0), Alone(), DeepAll()], ids=lambda m: m.name)
def test_four_rounds_are_four_steps_of_one_optimiser(method: Any) -> None:
    """One site and full batches: v ← μv + g, θ ← θ − ηv over all rounds, by hand; and from v = 0 where it is reset."""
    found = [vectors("alone", 8)]
    for keeps in (True, False):
        options: dict[str, Any] = {"momentum": 0.8, "lr": 0.2, "budget": 4, "reset_optimizer_each_round": not keeps}
        state, where = run(method, found, MLP, rounds=4, **options)
        assert isinstance(where, LocalFederation)
        site = next(iter(where._runners.values())).site
        model = site.model()
        inputs, labels, _ = next(site.data.all_batches(8))
        speed = [torch.zeros_like(value) for value in model.parameters()]
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for value, velocity, slope in zip(model.parameters(), speed, slopes, strict=True):
                    velocity.mul_(0.8 if keeps else 0.0).add_(slope)
                    value -= 0.2 * velocity
        for name, expected in model.state_dict().items():
            key = f"members.0.{name}" if isinstance(method, Alone) else name
            torch.testing.assert_close(state.weights[key], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", KEEPS)
def test_every_site_that_trains_keeps_it_if_asked_to(name: str) -> None:
    """A method that has a name for momentum fills it at every site that it trained, and is another with it."""
    method = method_of(name, **({"keep_momentum": False} if name == "mdfnet" else {}))
    network = normed_for(method) if name == "dsbn" else CNN
    results = []
    for keeps in (True, False):
        options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": not keeps}
        state, where = run(method, network=network, **options)
        assert isinstance(where, LocalFederation)
        for runner in where._runners.values():
            trained = where.progress.used[runner.site.name] > 0
            assert ("optimizer" in runner.site.memory) == (keeps and trained), runner.site.name
        results.append(state)
    assert results[0].weights != results[1].weights
