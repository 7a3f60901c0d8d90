"""DSBN: branches that share all but BatchNorm, both stages by hand, and what the second one begins with."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling import LEFT, LR, binary, first_batches, fit, moved, pool_of, start
from tiny import CNN, NORMED, domains, setting
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.federation.site import Site
from fedshift.methods.pooled.dsbn import DSBN, Parts, batch_norms, branches_of
from fedshift.models.network import Network
from fedshift.weights import Weights


def normed_pool(method: DSBN, progress: float = 0.0, **options: Any) -> Site:
    site = pool_of(method, NORMED, **options)
    site.begin(type(site.envelope)(1, 1, progress, LEFT))
    return site


def model_and_branches(number: int = 2) -> tuple[Network, list[Network]]:
    model = setting(DSBN(), domains(NORMED), NORMED).build_network().train()
    return model, branches_of(model, number)


def buffers(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.named_buffers()}


def test_a_batch_through_one_branch_leaves_the_others_alone() -> None:
    model, branches = model_and_branches(3)
    whole = [*branches, model]
    for number, network in enumerate(whole):
        before = [buffers(other) for other in whole]
        for other in whole:
            other.zero_grad()
        network(torch.rand(6, 5) + number).sum().backward()
        for other, kept in zip(whole, before, strict=True):
            assert bool(moved(kept, buffers(other))) == (other is network)
            layer = batch_norms(other)[0]
            assert (layer.weight.grad is not None) == (other is network)


def test_all_else_is_one_and_the_same() -> None:
    model, branches = model_and_branches()
    normal = {id(parameter) for layer in batch_norms(model) for parameter in layer.parameters()}
    assert len(normal) == 4
    for branch in branches:
        for one, other in zip(model.parameters(), branch.parameters(), strict=True):
            assert (one is other) == (id(one) not in normal)


@pytest.mark.parametrize(
    "options", [{}, {"adversarial_weight": 0.6, "semantic_weight": 0.0}, {"first_stage": 0.02}], ids=str
)
def test_a_first_step_by_hand(options: dict[str, Any]) -> None:
    """On networks that are apart, whose gradients are then added up for all but BatchNorm."""
    method = DSBN(width=8, **options)
    site, weights = normed_pool(method), start(method, NORMED)
    rate = math.tanh(5 * min(1.0, 4 / LEFT / method.first_stage))
    networks = [site.model(weights) for _ in range(4)]
    parts = method.parts(site, lambda: Parts(site.model(weights), 3, 8))
    sources, target = first_batches(site)
    batches = [*sources, target]
    features = [network.features(batch.inputs) for network, batch in zip(networks, batches, strict=True)]
    logits = [network.classifier(feature) for network, feature in zip(networks, features, strict=True)]
    labels = [*(batch.targets for batch in sources), logits[3].argmax(1)]
    error = sum(F.cross_entropy(logits[number], labels[number]) for number in range(3)) / 3
    told = binary(parts.discriminator(torch.cat(features[:3])), 1.0) + binary(parts.discriminator(features[3]), 0.0)
    semantic = torch.zeros(())
    for number in range(3):
        for label in range(3):
            ours, theirs = features[number][labels[number] == label], features[3][labels[3] == label]
            if len(ours) and len(theirs):  # at the first batch the averages are the batch's
                semantic = semantic + (ours.mean(0) - theirs.mean(0)).square().sum() / (3 * 3 * features[0].shape[1])
    of_model = error - method.adversarial_weight * rate * told + method.semantic_weight * rate * semantic
    of_discriminator = method.adversarial_weight * told
    down = torch.autograd.grad(of_discriminator, list(parts.discriminator.parameters()), retain_graph=True)
    gradients = [
        torch.autograd.grad(of_model, list(network.parameters()), retain_graph=True, allow_unused=True)
        for network in networks
    ]
    update = fit(method, site, weights)
    loss = error + method.adversarial_weight * told + method.semantic_weight * rate * semantic
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)  # type: ignore[union-attr]
    remembered = site.memory.weights("parts")
    normal = {id(parameter) for layer in batch_norms(networks[3]) for parameter in layer.parameters()}
    for place, (name, parameter) in enumerate(networks[3].named_parameters()):
        each = [own[place] for own in gradients]
        taken = [each[3]] if id(parameter) in normal else [gradient for gradient in each if gradient is not None]
        expected = parameter - LR * sum(taken)  # type: ignore[operator]
        torch.testing.assert_close(update.weights[name], expected, atol=1e-6, rtol=1e-5)
    for number in range(3):
        for layer, norm in enumerate(batch_norms(networks[number])):
            key = f"normalisations.{number}.{layer}"
            assert_close(remembered[f"{key}.running_mean"], norm.running_mean)
            place = [id(p) for p in networks[number].parameters()].index(id(norm.weight))
            assert_close(remembered[f"{key}.weight"], norm.weight - LR * gradients[number][place])  # type: ignore[operator]
    for (name, parameter), gradient in zip(parts.discriminator.named_parameters(), down, strict=True):
        assert_close(remembered[f"discriminator.{name}"], parameter - LR * gradient)


def assert_close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-5)


def test_centroids_move_with_their_classes() -> None:
    model, _ = model_and_branches()
    parts = Parts(model, 1, 4)
    one, two = torch.rand(4, 6), torch.rand(2, 6)
    first = parts.move(0, one, torch.tensor([0, 0, 2, 0]), 0.7)
    assert_close(first[0], one[[0, 1, 3]].mean(0))
    assert_close(first[2], one[2])
    assert not first[1].any()
    assert parts.seen.tolist() == [[True, False, True], [False] * 3]
    second = parts.move(0, two.requires_grad_(), torch.tensor([1, 0]), 0.7)
    assert_close(second[0], 0.7 * first[0] + 0.3 * two[1])
    assert_close(second[1], two[0])  # the first of its class
    assert_close(second[2], first[2])  # absent
    assert second.requires_grad
    assert not parts.centroids.requires_grad
    assert not parts.centroids[1].any()


def labelled_in_evaluation(trained: Network, inputs: Tensor) -> Tensor:
    """Logits by the running statistics, which the training pass of the same batch has moved already."""
    logits: Tensor = copy.deepcopy(trained).eval()(inputs)
    return logits


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_the_mode_in_which_stage_1_labels_the_target(mode: Any) -> None:
    """The target's centroids are the means of the classes that the model says in that mode."""
    method = DSBN(pseudo_labels=mode)
    site, weights = normed_pool(method), start(method, NORMED)
    weights = skewed(weights)
    network = site.model(weights).train()
    _, target = first_batches(site)
    features = network.features(target.inputs)
    said = {
        "training": network.classifier(features).argmax(1),
        "evaluation": labelled_in_evaluation(network, target.inputs).argmax(1),
    }
    assert not torch.equal(said["training"], said["evaluation"])  # else the case shows nothing
    fit(method, site, weights)
    found = site.memory.weights("parts")
    assert found["seen"][-1].tolist() == [bool((said[mode] == label).any()) for label in range(3)]
    for label in said[mode].unique().tolist():
        assert_close(found["centroids"][-1, label], features[said[mode] == label].mean(0))


def skewed(weights: Weights) -> Weights:
    """The same model with statistics of other samples, so that both modes say different classes."""
    moved = {name: value + 3.0 if name.endswith("running_mean") else value for name, value in weights.items()}
    return Weights(moved)


def test_the_code_multiplies_the_identifiers_own_loss_by_the_ramp() -> None:
    """Features get the same gradient; the identifier's is r(p) times as long."""
    steps = []
    for ramped in (False, True):
        method = DSBN(width=8, ramped_identifier=ramped, first_stage=1.0, semantic_weight=0.0, adversarial_weight=0.5)
        site, weights = normed_pool(method), start(method, NORMED)
        before = method.parts(site, lambda site=site, weights=weights: Parts(site.model(weights), 3, 8)).discriminator
        update = fit(method, site, weights)
        after = site.memory.weights("parts").select("discriminator")
        steps.append(
            (update.weights, {name: after[f"discriminator.{name}"] - p for name, p in before.named_parameters()})
        )
    (plain, whole), (ramped_weights, part) = steps
    for name, value in plain.items():
        torch.testing.assert_close(ramped_weights[name], value, atol=1e-6, rtol=1e-5)
    rate = math.tanh(5 * 4 / LEFT)
    for name, move in whole.items():
        torch.testing.assert_close(part[name], rate * move, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("student", "mode", "mixed"),
    [
        ("new", "training", "probabilities"),
        ("teacher", "training", "probabilities"),
        ("new", "evaluation", "logits"),
        ("new", "evaluation", "probabilities"),
        ("new", "training", "logits"),
    ],
)
def test_a_second_step_by_hand(student: Any, mode: Any, mixed: Any) -> None:
    method = DSBN(student=student, first_stage=0.5, pseudo_labels=mode, mixed=mixed)
    trained = fit(method, normed_pool(method), start(method, NORMED), steps=5).weights
    site = normed_pool(method, progress=0.5)
    teacher = site.model(trained).eval()
    networks = [site.model(start(method, NORMED) if student == "new" else trained) for _ in range(4)]
    sources, target = first_batches(site)
    rate = math.tanh(5 * ((0.5 + 0.5 * 4 / LEFT) - 0.5) / 0.5)
    logits = networks[3](target.inputs)
    own = logits if mode == "training" else labelled_in_evaluation(networks[3], target.inputs)
    scores = (teacher(target.inputs), own) if mixed == "logits" else (teacher(target.inputs).softmax(1), own.softmax(1))
    labels = ((1 - rate) * scores[0] + rate * scores[1]).argmax(1)
    loss = sum(
        F.cross_entropy(network(batch.inputs), batch.targets) for network, batch in zip(networks, sources, strict=False)
    ) / 3 + F.cross_entropy(logits, labels)
    gradients = [torch.autograd.grad(loss, list(network.parameters()), retain_graph=True) for network in networks]
    update = fit(method, site, trained)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert site.memory["teacher"] == trained
    normal = {id(parameter) for layer in batch_norms(networks[3]) for parameter in layer.parameters()}
    for place, (name, parameter) in enumerate(networks[3].named_parameters()):
        each = [own[place] for own in gradients]
        expected = parameter - LR * (each[3] if id(parameter) in normal else sum(each))
        assert_close(update.weights[name], expected)


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_labelling_in_evaluation_mode_moves_no_statistics_and_ends_with_the_label(progress: float) -> None:
    """Each step moves the target's statistics once: by its training pass."""
    method = DSBN(pseudo_labels="evaluation", first_stage=0.5)
    update = fit(method, normed_pool(method, progress=progress), start(method, NORMED), steps=3)
    counted = [int(value) for name, value in update.weights.items() if name.endswith("num_batches_tracked")]
    assert counted
    assert set(counted) == {3}


def test_what_is_mixed_decides_between_a_loud_teacher_and_a_student_that_counts_more() -> None:
    """With a share of 0.0002, the teacher's logits decide if they are large; its probabilities, at most one, do not."""
    found = {}
    for mixed in ("probabilities", "logits"):
        method = DSBN(mixed=mixed)
        site, student = normed_pool(method, progress=0.95), start(method, NORMED)
        loud = {"classifier.bias": torch.tensor([0.0, 0.0, 1e6]), "classifier.weight": 0 * student["classifier.weight"]}
        site.memory["teacher"] = student.merge(loud)
        network = site.model(student)
        sources, target = first_batches(site)
        logits = network(target.inputs)
        labels = logits.argmax(1) if mixed == "probabilities" else torch.full((len(logits),), 2)
        assert not bool((logits.argmax(1) == 2).all())
        supervised = [F.cross_entropy(site.model(student)(batch.inputs), batch.targets) for batch in sources]
        expected = torch.stack(supervised).mean() + F.cross_entropy(logits, labels)
        found[mixed] = fit(method, site, student).loss
        assert found[mixed] == pytest.approx(expected.item(), rel=1e-5)
    assert found["logits"] != pytest.approx(found["probabilities"], rel=1e-2)


def test_a_new_student_has_no_momentum_of_the_teacher() -> None:
    """Its first step is that of a site that never trained in stage 1."""
    method, options = DSBN(), {"momentum": 0.9, "reset_optimizer_each_round": False}
    site = normed_pool(method, **options)
    teacher = fit(method, site, start(method, NORMED), steps=3).weights
    found = []
    for pool in (site, normed_pool(method, **options)):
        pool.begin(type(pool.envelope)(2, 2, 0.5, LEFT))
        found.append(fit(method, pool, teacher).weights)
    assert found[0] == found[1]


def test_the_second_stage_begins_with_a_round_and_forgets_the_first() -> None:
    method = DSBN()
    site = normed_pool(method, reset_optimizer_each_round=False, momentum=0.5)
    trained = fit(method, site, start(method, NORMED), steps=2).weights
    assert site.memory.weights("parts")["seen"].any()
    site.begin(type(site.envelope)(2, 2, 0.49, LEFT))
    again = fit(method, site, trained).weights
    assert "teacher" not in site.memory
    site.begin(type(site.envelope)(3, 3, 0.5, LEFT))
    student = fit(method, site, again).weights
    assert site.memory["teacher"] == again
    assert not site.memory.weights("parts")["seen"].any()
    site.begin(type(site.envelope)(4, 4, 0.6, LEFT))
    fit(method, site, student)
    assert site.memory["teacher"] == again  # stays


def test_networks_without_batch_norm_are_refused() -> None:
    DSBN().check(setting(DSBN(), domains(NORMED), NORMED).build_network())
    with pytest.raises(UserError, match="no BatchNorm"):
        DSBN().check(setting(DSBN(), domains(CNN), CNN).build_network())
