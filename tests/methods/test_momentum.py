"""Momentum that a site keeps from round to round, where the experiment asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_method import method_of, mostly_slow
from tiny import CNN, MLP, normed_for, run, vectors

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.federated.alone import Alone
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.pooled.deepall import DeepAll

KEEPS = [name for name in registry.names() if "optimizer" in registry.method_class(name)().traits.memory_names]
KEEPS_ANYWAY = [name for name in KEEPS if "keep_momentum" in registry.method_class(name).model_fields]


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


@pytest.mark.parametrize("name", mostly_slow(KEEPS))
def test_every_site_that_trains_keeps_it_if_asked_to(name: str) -> None:
    """A method that has a name for momentum fills it at every site that it trained, and is another with it.

    MDFNet leaves that to the experiment with `keep_momentum: false` only.
    """
    method = method_of(name, **({"keep_momentum": False} if name in KEEPS_ANYWAY else {}))
    network = normed_for(method) if name == "dsbn" else CNN
    results = []
    for keeps in (True, False):
        options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": not keeps}
        if name == "dsbn":  # with fewer its second round begins with a new student, without momentum
            options["budget"] = 60
        state, where = run(method, network=network, **options)
        assert isinstance(where, LocalFederation)
        for runner in where._runners.values():
            trained = where.progress.used[runner.site.name] > 0
            assert ("optimizer" in runner.site.memory) == (keeps and trained), runner.site.name
        results.append(state)
    assert results[0].weights != results[1].weights


@pytest.mark.parametrize("name", KEEPS_ANYWAY)
def test_a_method_may_keep_it_whatever_the_experiment_says(name: str) -> None:
    """As with `keep_momentum: false` and an experiment that asks for it, bit for bit."""

    def weights(keep: bool, reset: bool) -> object:
        method = method_of(name, keep_momentum=keep)
        return run(method, momentum=0.9, reset_optimizer_each_round=reset)[0].weights

    asked = weights(keep=False, reset=False)
    assert weights(keep=True, reset=True) == asked
    assert weights(keep=True, reset=False) == asked
    assert weights(keep=False, reset=True) != asked
