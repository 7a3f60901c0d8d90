"""The recipe for a site without labels: FedAvg at the labelled sites; the target's own model against its equations."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_shot import everything, nearest_labels
from tiny import CNN, NORMED, domains, federation, run, setting, start_of, step_on, vectors
from torch import Tensor

from fedshift.federation.site import Site
from fedshift.functional.averaging import is_buffer
from fedshift.methods.base import State
from fedshift.methods.federated import recipe_unlabelled
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.recipe_unlabelled import RecipeUnlabelled, spread_labels
from fedshift.models.network import Network
from fedshift.weights import Weights

ROLES: dict[str, Any] = {"a": "source", "b": "target"}
FOUND = [vectors("a", 8), vectors("b", 8)]
NO_MOMENTUM: dict[str, Any] = {"roles": ROLES, "momentum": 0.0}


def side(state: State, name: str) -> Weights:
    return Weights({key.removeprefix(f"{name}."): value for key, value in state.weights.select(name).items()})


def network(method: RecipeUnlabelled, weights: Weights) -> Network:
    built: Network = setting(method, FOUND, NORMED).build_network()
    built.load_state_dict(dict(weights))
    return built


def normalised(model: Network, inputs: Tensor) -> Network:
    """The model in evaluation mode with the statistics of these inputs, which are one batch."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train()(inputs)
    return model.eval()


def assert_like(found: Weights, wanted: Network) -> None:
    for name, value in wanted.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(
                found[name], value, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: name + text
            )


def test_the_labelled_sites_train_as_with_fedavg() -> None:
    found = [vectors("a", 9), vectors("b", 6), vectors("c", 7)]
    roles: dict[str, Any] = {"a": "source", "b": "source", "c": "target"}
    ours, plain = (run(method, found, NORMED, rounds=1, roles=roles)[0] for method in (RecipeUnlabelled(), FedAvg()))
    assert side(ours, "labelled") == plain.weights  # after one round: later exchanges have other numbers and orders


def test_while_it_waits_the_target_has_their_model_with_its_own_statistics() -> None:
    method = RecipeUnlabelled(begin=0.5)
    where = federation(method, FOUND, NORMED, rounds=2, budget=4, **NO_MOMENTUM)
    state = step_on(method, where, method.start(where, start_of(method, FOUND, NORMED)))
    assert where.progress.used == {"a": 1, "b": 0}
    inputs, _ = everything(where, "b")
    assert_like(side(state, "own"), normalised(network(method, side(state, "labelled")), inputs))


@pytest.mark.parametrize(
    "options", [{}, {"information_weight": 0.2, "pseudo_label_weight": 0.7}, {"pseudo_label_weight": 0.0}], ids=str
)
def test_a_step_at_the_target_is_the_equation(options: dict[str, Any]) -> None:
    method = RecipeUnlabelled(begin=0.0, pseudo_labels="centroids", **options)
    where = federation(method, FOUND, NORMED, rounds=1, budget=1, **NO_MOMENTUM)
    state = step_on(method, where, method.start(where, start_of(method, FOUND, NORMED)))
    inputs, _ = everything(where, "b")
    model = normalised(network(method, side(state, "labelled")), inputs)
    with torch.no_grad():
        features = model.features(inputs)
        labels = nearest_labels(features, model.classifier(features).softmax(1))
    p = model.train()(inputs).softmax(1)
    certain = -(p * (p + 1e-5).log()).sum(1).mean()
    diverse = -(p.mean(0) * (p.mean(0) + 1e-5).log()).sum()
    right = -p[torch.arange(len(p)), labels].log().mean()
    loss = method.information_weight * (certain - diverse) + method.pseudo_label_weight * right
    assert state.report["losses"]["b"] == pytest.approx(loss.item(), abs=1e-5)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    for value, slope in zip(model.parameters(), slopes, strict=True):
        value.data -= 0.05 * slope
    assert_like(side(state, "own"), normalised(model, inputs))


@pytest.mark.parametrize(("rounds", "wanted"), [(4, [0, 0, 2, 4]), (3, [0, 2, 3]), (1, [1])])
def test_the_target_does_all_its_work_after_it_waited(rounds: int, wanted: list[int]) -> None:
    method = RecipeUnlabelled(begin=0.5)
    where = federation(method, FOUND, NORMED, rounds=rounds, budget=rounds, **NO_MOMENTUM)
    state, used = method.start(where, start_of(method, FOUND, NORMED)), []
    for _ in range(rounds):
        state = step_on(method, where, state)
        used.append(where.progress.used["b"])
    assert used == wanted
    assert method.target_mini_batches(1, rounds) == method.mini_batches(1, rounds) == rounds


def test_the_target_goes_on_from_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Weights] = []
    whole = Site.minimise

    def seen(self: Site, loss_of: Any, *modules: Any, **options: Any) -> float:
        if self.role == "target":
            begun.append(self.weights_of(modules[0]))
        return whole(self, loss_of, *modules, **options)

    monkeypatch.setattr(Site, "minimise", seen)
    method = RecipeUnlabelled(begin=0.0)
    where = federation(method, FOUND, NORMED, rounds=2, budget=4, **NO_MOMENTUM)
    first = step_on(method, where, method.start(where, start_of(method, FOUND, NORMED)))
    step_on(method, where, first)
    assert begun[0].without(is_buffer) == side(first, "labelled").without(is_buffer)
    assert begun[1] == side(first, "own")


@pytest.mark.parametrize(
    ("options", "kept", "trusted"),
    [({}, 0.69, False), ({}, 0.7, True), ({"trust": 0.9}, 0.8, False), ({"trust": 0.0}, 0.0, True)],
)
def test_below_trust_the_labelled_sites_model_answers_at_the_target(
    options: dict[str, Any], kept: float, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target compares both models' predictions for all its samples, and trains its own one on in either case."""
    asked: list[tuple[Tensor, Tensor]] = []
    begun: list[Network] = []
    whole = Site.minimise

    def judged(before: Tensor, after: Tensor) -> float:
        asked.append((before, after))
        return kept

    def seen(self: Site, loss_of: Any, *modules: Any, **options: Any) -> float:
        if self.role == "target":
            begun.append(copy.deepcopy(modules[0]).eval())
        return whole(self, loss_of, *modules, **options)

    monkeypatch.setattr(recipe_unlabelled, "kept_answers", judged)
    monkeypatch.setattr(Site, "minimise", seen)
    method = RecipeUnlabelled(begin=0.0, **options)
    where = federation(method, FOUND, NORMED, rounds=2, budget=4, **(NO_MOMENTUM | {"lr": 0.5}))
    state = step_on(method, where, method.start(where, start_of(method, FOUND, NORMED)))
    step_on(method, where, state)
    inputs, _ = everything(where, "b")
    theirs, own = normalised(network(method, side(state, "labelled")), inputs), begun[1]
    with torch.no_grad():
        torch.testing.assert_close(asked[0][0], theirs(inputs).softmax(1), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(asked[0][1], own(inputs).softmax(1), atol=2e-6, rtol=1e-5)
        assert not torch.allclose(*asked[0], atol=1e-3)
    assert_like(side(state, "own"), own if trusted else theirs)
    assert state.report["kept_answers"] == {"b": kept}


def test_a_step_of_the_server_is_of_the_labelled_sites_model_alone() -> None:
    method = RecipeUnlabelled()
    weights = Weights({"labelled.w": torch.zeros(1), "own.w": torch.zeros(1)})
    assert list(method.personal(weights)) == ["own.w"]


def test_labels_of_neighbours_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the model with which the target begins, and are those of every later round. In noise they are not
    those of centroids.
    """
    noise = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    found = [FOUND[0], dataclasses.replace(FOUND[1], inputs=noise)]
    losses: list[Any] = []
    whole = Site.minimise

    def seen(self: Site, loss_of: Any, *modules: Any, **options: Any) -> float:
        if self.role == "target":
            (batch,) = self.all_batches()
            losses.append((loss_of(batch).item(), modules[0](batch.inputs).detach()))
        return whole(self, loss_of, *modules, **options)

    counted = Mock(wraps=spread_labels)
    monkeypatch.setattr(recipe_unlabelled, "spread_labels", counted)
    monkeypatch.setattr(Site, "minimise", seen)
    method = RecipeUnlabelled(begin=0.0, pseudo_labels="neighbours", information_weight=0.0, pseudo_label_weight=0.7)
    where = federation(method, found, NORMED, rounds=3, budget=3, **(NO_MOMENTUM | {"lr": 0.5}))
    state = step_on(method, where, method.start(where, start_of(method, found, NORMED)))
    inputs, _ = everything(where, "b")
    first = normalised(network(method, side(state, "labelled")), inputs)
    with torch.no_grad():
        features, probabilities = first.features(inputs), first(inputs).softmax(1)
    labels = spread_labels(inputs, probabilities)
    assert not torch.equal(labels, nearest_labels(features, probabilities))
    for _ in range(2):
        state = step_on(method, where, state)
    assert (len(losses), counted.call_count) == (3, 1)
    for loss, logits in losses:
        assert loss == pytest.approx(0.7 * torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


@pytest.mark.parametrize(("network", "times"), [(NORMED, 1), (CNN, 0)], ids=["vectors", "images"])
def test_neighbours_are_for_vectors_unless_they_are_asked_for(
    network: dict[str, object], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(wraps=spread_labels)
    monkeypatch.setattr(recipe_unlabelled, "spread_labels", counted)
    run(RecipeUnlabelled(begin=0.0), domains(network), network, rounds=1, budget=1)
    assert counted.call_count == times
