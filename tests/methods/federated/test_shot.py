"""SHOT against its equations, and what it sends, freezes and remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import MLP, NORMED, domains, evaluated, federation, run, setting, start_of, step_on, vectors
from torch import Tensor

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.methods.federated import shot
from fedshift.methods.federated.shot import SHOT, ensemble_weights, member_weights, members_by_name
from fedshift.models.network import Network
from fedshift.weights import Weights

ROLES: dict[str, Any] = {"a": "source", "b": "target"}


def short(**options: Any) -> SHOT:
    return SHOT(**{"source_epochs": 1, "bottleneck": 16, **options})


def fresh(method: SHOT, weights: Weights | None = None, network: dict[str, object] = MLP) -> Network:
    built = setting(method, [vectors("a", 8)], network).build_network()
    if weights is not None:
        built.load_state_dict(dict(weights))
    return built


def everything(where: Any, site: str) -> tuple[Tensor, Tensor]:
    """A site's samples and labels, read past what the method may see."""
    inputs, labels, _ = next(iter(where._runners[site].site.data.all_batches(500)))
    return inputs, labels


def descend(model: Network, loss: Tensor, rate: float, slow: float) -> None:
    """One step of plain gradient descent, the backbone's at ``slow`` times the rate; what is frozen stays."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for (name, value), slope in zip(
        parameters.items(), torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        value.data -= rate * (slow if name.startswith("features.backbone.") else 1.0) * slope


def assert_like(found: Weights, model: Network) -> None:
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: name + text)


def test_source_steps_are_the_equation() -> None:
    """Two steps on a whole small site: targets (1 − α)·1[c = y] + α/C; rates at p = 0 and ½."""
    method = short(label_smoothing=0.2, backbone_rate=0.3)
    found = [vectors("a", 8), vectors("b", 8)]
    where = federation(method, found, MLP, roles=ROLES, budget=2, rounds=2, momentum=0.0)
    state = method.start(where, start_of(method, found, MLP))
    model = fresh(method)
    inputs, labels = everything(where, "a")
    for factor in (1.0, 6**-0.75):
        logits = model(inputs)
        wanted = torch.full_like(logits, 0.2 / 3)
        wanted[torch.arange(8), labels] += 0.8
        loss = -(wanted * logits.log_softmax(1)).sum(1).mean()
        descend(model, loss, 0.05 * factor, 0.3)
    assert_like(next(member_weights(state.weights)), model)
    assert where.progress.used == {"a": 2, "b": 0}


def nearest_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Pseudo-labels, written out sample by sample and class by class."""
    points = torch.cat([features, torch.ones(len(features), 1)], 1)
    points = points / points.norm(dim=1, keepdim=True)
    labels = probabilities.argmax(1)
    weights = probabilities
    for _ in range(2):
        centroids = {c: (weights[:, c : c + 1] * points).sum(0) / weights[:, c].sum() for c in labels.unique().tolist()}
        distances = {c: 1 - points @ centroid / centroid.norm() for c, centroid in centroids.items()}
        labels = torch.tensor([min(distances, key=lambda c: distances[c][row]) for row in range(len(points))])
        weights = torch.nn.functional.one_hot(labels, probabilities.shape[1]).float()
    return labels


@pytest.mark.parametrize(
    ("options", "weight", "slow"),
    [
        ({"pseudo_label_weight": 0.4, "backbone_rate": 0.2}, 0.4, 0.2),
        ({}, 0.3, 1.0),
        ({"setting": "digits"}, 0.1, 1.0),
        ({"setting": "pretrained"}, 0.3, 0.1),
    ],
    ids=str,
)
def test_a_target_step_is_the_equation(options: dict[str, Any], weight: float, slow: float) -> None:
    method = short(**options)
    found = [vectors("a", 8), vectors("b", 8)]
    where = federation(method, found, MLP, roles=ROLES, budget=8, rounds=1, momentum=0.0)
    state = method.start(where, start_of(method, found, MLP))
    model = fresh(method, next(member_weights(state.weights)))
    state = step_on(method, where, state)
    inputs, _ = everything(where, "b")
    model.eval()
    with torch.no_grad():
        features = model.features(inputs)
        labels = nearest_labels(features, model.classifier(features).softmax(1))
    model.train()
    model.classifier.requires_grad_(False)
    p = model(inputs).softmax(1)
    certain = -(p * (p + 1e-5).log()).sum(1).mean()
    diverse = -(p.mean(0) * (p.mean(0) + 1e-5).log()).sum()
    right = -p[torch.arange(8), labels].log().mean()
    loss = certain - diverse + weight * right
    assert state.report["losses"]["b"] == pytest.approx(loss.item(), abs=1e-5)
    descend(model, loss, 0.05, slow)
    assert_like(next(member_weights(state.weights)), model)


def test_the_classifier_is_frozen_at_the_target() -> None:
    method = short()
    where = federation(method, network=NORMED, rounds=2, momentum=0.9, weight_decay=0.1)
    before = method.start(where, start_of(method, network=NORMED)).weights
    after = run(method, network=NORMED, momentum=0.9, weight_decay=0.1)[0].weights
    classifier = {name for name in before if ".classifier." in name}
    assert len(classifier) == 3 * 3  # magnitude, direction and bias of each member
    for name, tensor in before.items():
        if name in classifier:
            assert torch.equal(tensor, after[name]), name
    for part in ("bottleneck.0", "backbone.hidden1.0"):
        name = f"members.0.features.{part}.weight"
        assert not torch.equal(before[name], after[name])


@pytest.mark.parametrize(("target_epochs", "expected"), [(1, [2, 1, 0]), (3, [3, 3, 3])])
def test_pseudo_labels_are_refreshed_once_per_epoch_of_a_model(
    target_epochs: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has 2 mini-batches per epoch and 3 models: with one epoch in a round they need 3 rounds for an epoch
    each, and labels drawn at the start of a model's epoch serve to its end."""
    calls: list[Tensor] = []
    original = shot.pseudo_labels_at

    def counted(site: Site, model: Network) -> Tensor:
        assert site.role == "target"
        calls.append(original(site, model))
        return calls[-1]

    monkeypatch.setattr(shot, "pseudo_labels_at", counted)
    method = short(target_epochs=target_epochs)
    where = federation(method, rounds=3, budget=36)
    assert isinstance(where, LocalFederation)
    state = method.start(where, start_of(method))
    assert not calls
    found = []
    for _ in range(3):
        before = len(calls)
        state = step_on(method, where, state)
        found.append(len(calls) - before)
    memory = where._runners["target"].site.memory
    trained: Any = memory["trained"]
    assert set(trained.values()) == {2 * target_epochs}  # shared evenly
    assert found == expected
    labels: Any = memory["labels"]
    for known in labels.values():
        assert any(torch.equal(known, call) for call in calls)


def test_a_backbone_rate_of_0_leaves_the_backbone_as_it_began() -> None:
    method = short(backbone_rate=0.0)
    state, _ = run(method)
    start = start_of(method)
    for member in member_weights(state.weights):
        for name in (name for name in start if name.startswith("features.backbone.")):
            assert torch.equal(member[name], start[name])


def test_without_decay_the_experiments_schedule_holds_at_both_sides() -> None:
    def schedules(method: SHOT, **options: Any) -> tuple[Weights, Weights]:
        where = federation(method, rounds=2, **options)
        started = method.start(where, start_of(method))
        return started.weights, step_on(method, where, started).weights

    assert schedules(short(decay=False), lr_schedule="inverse_power") == schedules(short())
    assert schedules(short(), lr_schedule="cosine") == schedules(short())
    for falling, constant in zip(
        schedules(short(decay=False), lr_schedule="cosine"), schedules(short(decay=False)), strict=True
    ):
        members = zip(member_weights(falling), member_weights(constant), strict=True)
        assert all(slow["classifier.bias"].ne(fast["classifier.bias"]).any() for slow, fast in members)


def test_the_ensemble_answers_with_the_mean_of_its_members() -> None:
    method = short()
    state, where = run(method, network=NORMED)
    model = evaluated(method, state.weights, network=NORMED)
    inputs, _ = everything(where, "large")
    with torch.no_grad():
        scores = model(inputs)
        each = []
        for weights in member_weights(state.weights):
            member = setting(method, domains(NORMED), NORMED).build_network()
            member.load_state_dict(dict(weights))
            each.append(member.eval()(inputs).softmax(1))
    assert len(each) == 3
    torch.testing.assert_close(scores.softmax(1), sum(each) / 3, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(len(inputs)))


def test_weights_go_into_members_by_name_and_come_back() -> None:
    models = {name: Weights({"x.y": torch.tensor([value])}) for name, value in (("b", 2.0), ("a", 1.0))}
    whole = ensemble_weights(models, ["b", "a"])
    assert list(whole) == ["counted", "members.0.x.y", "members.1.x.y"]
    assert [member["x.y"].item() for member in member_weights(whole)] == [1.0, 2.0]
    assert members_by_name(whole, ["b", "a"]) == models
    letters = [chr(97 + n) for n in range(12)]
    twelve = ensemble_weights({name: Weights({"w": torch.tensor(n)}) for n, name in enumerate(letters)}, letters)
    assert [int(member["w"]) for member in member_weights(twelve)] == list(range(12))
