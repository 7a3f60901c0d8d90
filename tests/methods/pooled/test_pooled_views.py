"""MixStyle, CrossGrad, FACT, JiGen and EISNet: a step by hand, and DeepAll where their terms are off."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pooled_step import assert_same, descend, mixed_batch, pool, step, trainable
from pooling import LR
from tiny import CNN, MLP, NORMED, NORMED_CNN

from fedshift.errors import UserError
from fedshift.federation.site import Envelope
from fedshift.methods import registry
from fedshift.methods.base import Samples
from fedshift.methods.composition.mean_teacher import MeanTeacher
from fedshift.methods.composition.mixstyle import Mixer, beta, mixed_styles
from fedshift.methods.composition.puzzles import Puzzles, shuffled_tiles, tile_mask, tile_permutations
from fedshift.methods.composition.triplets import momentum_triplet_loss
from fedshift.methods.pooled.crossgrad import CrossGrad, with_classes
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.pooled.eisnet import EISNet, Parts
from fedshift.methods.pooled.fact import FACT
from fedshift.methods.pooled.jigen import JiGen
from fedshift.methods.pooled.mixstyle import MixStyle
from fedshift.models import registry as networks


@pytest.mark.parametrize(
    "options",
    [
        {"name": "mixstyle", "probability": 0.0},
        {"name": "mixstyle", "stages": []},
        {"name": "jigen", "ordered": 1.0, "jigsaw_weight": 0.0},
        {"name": "eisnet", "ordered": 1.0, "jigsaw_weight": 0.0, "metric_weight": 0.0, "metric_weight_end": 0.0},
        {"name": "crossgrad", "label_share": 0.0},
        {"name": "fact", "strength": 0.0, "consistency_weight": 0.0, "cross_entropy_weight": 0.5},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_it_is_deepall_where_its_terms_are_off(options: dict[str, object]) -> None:
    method = registry.parse(options)
    site, weights, _ = pool(method)
    plain, same, _ = pool(DeepAll())
    expected = step(DeepAll(), plain, same, steps=3)
    found = step(method, site, weights, steps=3)
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["fact", "jigen", "eisnet", "mixstyle"])
def test_vectors_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} needs images"):
        registry.parse({"name": name}).check_samples(Samples((5,)))


# MixStyle -------------------------------------------------------------------------------------------------------------


def test_a_stage_answers_with_mixed_styles() -> None:
    site, _, model = pool(MixStyle())
    inputs = torch.randn(6, *site.data.input_shape, generator=torch.Generator().manual_seed(0))
    _, stages = model.with_stages(inputs, ["conv1"])
    mixer = Mixer(1.0, 0.1, torch.Generator().manual_seed(5), across=False)
    mixer.attach(model, ("conv1",))
    _, mixed = model.with_stages(inputs, ["conv1"])
    draws = torch.Generator().manual_seed(5)
    torch.rand((), generator=draws)
    order = torch.randperm(6, generator=draws)
    expected = mixed_styles(stages["conv1"], order, beta(0.1, 6, draws).float())
    torch.testing.assert_close(mixed["conv1"], expected)


def test_it_mixes_in_training_alone_and_as_often_as_asked() -> None:
    site, _, model = pool(MixStyle())
    inputs = torch.randn(4, *site.data.input_shape)
    plain = model.eval()(inputs)
    Mixer(0.5, 0.1, torch.Generator().manual_seed(0), across=False).attach(model, ("conv1",))
    assert torch.equal(model.eval()(inputs), plain)
    model.train()
    changed = sum(not torch.equal(model(inputs), plain) for _ in range(200))
    assert 70 < changed < 130


def test_all_stages_mix_but_the_last() -> None:
    _, _, model = pool(MixStyle())
    Mixer(1.0, 0.1, torch.Generator(), across=False).attach(model, None)
    mixing = [name for name, place in model.stages.items() if model.get_submodule(place)._forward_hooks]
    assert mixing == list(model.stages)[:-1]


def test_the_stem_of_a_resnet_does_not_mix() -> None:
    """As in the authors' networks: behind the first three blocks."""
    model = networks.build(networks.parse({"name": "resnet18"}), (3, 32, 32), 7, seed=0)
    Mixer(1.0, 0.1, torch.Generator(), across=False).attach(model, None)
    mixing = [name for name, place in model.stages.items() if model.get_submodule(place)._forward_hooks]
    assert mixing == ["block1", "block2", "block3"]


def test_mixstyle_with_domain_labels_mixes_halves_of_two_domains() -> None:
    """Its step by hand. The paper's order of partners; the code's halves."""
    method = MixStyle(partners="cross_domain", probability=1.0, stages=("conv1",))
    site, weights, model = pool(method)
    batch = next(site.paired_batches(1))
    site.mini_batches = 0
    draws = site.generator_for("mixstyle")
    torch.rand((), generator=draws)
    first, second = torch.randperm(4, generator=draws), 4 + torch.randperm(4, generator=draws)
    order, weight = torch.cat([second, first]), beta(0.1, 8, draws).float()

    def mixed(_: object, __: object, maps: torch.Tensor) -> torch.Tensor:
        return mixed_styles(maps, order, weight)

    model.get_submodule(model.stages["conv1"]).register_forward_hook(mixed)
    descend(F.cross_entropy(model(batch.inputs), batch.targets), trainable(model))
    assert_same(step(method, site, weights).weights, model)


def test_a_paired_batch_has_half_of_each_of_two_domains() -> None:
    """Every pair is drawn, in both orders; every sample comes as often as any of its domain."""
    site, _, _ = pool(MixStyle())
    pairs, rows = set(), []
    for batch in site.paired_batches(120):
        assert len(batch.inputs) == 8
        first, second = batch.domains[:4].unique().tolist(), batch.domains[4:].unique().tolist()
        assert len(first) == len(second) == 1
        pairs.add((*first, *second))
        rows.append(batch.rows)
        for inputs, row in zip(batch.inputs, batch.rows, strict=True):
            torch.testing.assert_close(inputs, site.data.batch(row[None], None)[0][0])
    assert pairs == set(itertools.permutations(range(3), 2))
    assert site.mini_batches == 120
    counts, numbers = torch.cat(rows).bincount(), site.data.domain_numbers
    for number in range(3):
        own = counts[numbers == number]
        assert own.max() - own.min() <= 1


def test_the_weights_are_of_a_beta_distribution() -> None:
    draws = torch.Generator().manual_seed(0)
    for alpha in (0.1, 2.0):
        found = beta(alpha, 20000, draws).double()
        assert found.mean().item() == pytest.approx(0.5, abs=0.02)
        assert found.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.04)


# CrossGrad ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [CNN, MLP], ids=["images", "vectors"])
def test_a_step_of_crossgrad_by_hand(network: dict[str, object]) -> None:
    method = CrossGrad(perturbation=2.0, label_share=0.3, domain_share=0.6, clip=0.01)
    site, weights, model = pool(method, network)
    domain = method.parts(site, lambda: with_classes(model, 3))
    batch = mixed_batch(site)
    probe = batch.inputs.clone().requires_grad_(True)
    (by_label,) = torch.autograd.grad(F.cross_entropy(model(probe), batch.targets), probe)
    (by_domain,) = torch.autograd.grad(F.cross_entropy(domain(probe), batch.domains), probe)
    moved = batch.inputs + 2.0 * by_domain.clamp(-0.01, 0.01), batch.inputs + 2.0 * by_label.clamp(-0.01, 0.01)
    label = 0.7 * F.cross_entropy(model(batch.inputs), batch.targets) + 0.3 * F.cross_entropy(
        model(moved[0]), batch.targets
    )
    other = 0.4 * F.cross_entropy(domain(batch.inputs), batch.domains) + 0.6 * F.cross_entropy(
        domain(moved[1]), batch.domains
    )
    descend(label, trainable(model))
    descend(other, trainable(domain))
    update = step(method, site, weights)
    assert update.loss == pytest.approx((label + other).item(), rel=1e-5)
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), domain)


def test_both_networks_of_crossgrad_train_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm of the domain network follows its batches, also after a round."""
    method = CrossGrad()
    site, weights, _ = pool(method, NORMED)
    first = step(method, site, weights)
    kept = site.memory.weights("parts")
    site.begin(Envelope(2, 2, 0.1, 300))
    later = step(method, site, first.weights)
    for before, after in ((first.weights, later.weights), (kept, site.memory.weights("parts"))):
        statistics = [name for name in before if name.endswith("running_mean")]
        assert statistics
        assert all(not torch.equal(before[name], after[name]) for name in statistics)


def test_the_original_bounds_the_gradient_of_every_parameter() -> None:
    method = CrossGrad(parameter_clip=0.01)
    site, weights, model = pool(method)
    start = method.parts(site, lambda: with_classes(model, 3)).state_dict()
    update = step(method, site, weights)
    for before, after in ((weights, update.weights), (start, site.memory.weights("parts"))):
        largest = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
        assert largest == pytest.approx(0.01 * LR, rel=1e-3)


# FACT -----------------------------------------------------------------------------------------------------------------


def test_two_steps_of_fact_by_hand() -> None:
    """The spectra with numpy, the divergences written out, and the teacher between the steps.

    The teacher begins far from the model: near to it, both directions of a divergence would be alike.
    """
    method = FACT(consistency_weight=3.0, temperature=2.0, momentum=0.2, ramp_epochs=0.0)
    site, weights, model = pool(method)
    batches = list(itertools.islice(site.batches(steps=2), 2))
    site.mini_batches = site._orders = 0
    draws = site.generator_for("amplitude mix")
    whole = MeanTeacher(model, 0.2, warm_up=True)
    teacher = whole.network
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    site.memory["parts"] = site.weights_of(whole)
    losses = []
    for number, batch in enumerate(batches):
        pixels = site.pixels(batch.inputs)
        order = torch.randperm(len(pixels), generator=draws)
        rate = torch.rand(len(pixels), 1, 1, 1, generator=draws).numpy()
        spectrum, other = np.fft.fft2(pixels.numpy()), np.fft.fft2(pixels[order].numpy())
        amplitudes = (1 - rate) * np.abs(spectrum) + rate * np.abs(other)
        image = np.fft.ifft2(amplitudes * np.exp(1j * np.angle(spectrum))).real.clip(0, 1)
        mixed = site.inputs_of(torch.tensor(image, dtype=torch.float32))
        plain, changed = model(batch.inputs), model(mixed)
        loss = F.cross_entropy(plain, batch.targets) + F.cross_entropy(changed, batch.targets)
        with torch.no_grad():
            said = [(teacher(inputs) / 2).softmax(1) for inputs in (batch.inputs, mixed)]
        for target, student in zip(said, (changed, plain), strict=True):
            gap = target * (target.log() - (student / 2).log_softmax(1))
            loss = loss + 3.0 * gap.sum(1).mean()
        losses.append(loss.item())
        descend(loss, trainable(model))
        share = min(1 - 1 / (number + 2), 0.2)
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.copy_(share * old + (1 - share) * new)
    update = step(method, site, weights, steps=2)
    assert update.loss == pytest.approx(sum(losses) / 2, rel=1e-4)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(update.weights[name], tensor, atol=1e-5, rtol=1e-4)
    kept = site.memory.weights("parts")
    assert int(kept["steps"]) == 2
    for name, tensor in teacher.state_dict().items():
        torch.testing.assert_close(kept[f"network.{name}"], tensor, atol=1e-5, rtol=1e-4)


def test_the_consistency_of_fact_grows_over_five_epochs() -> None:
    """exp(−5 (1 − epoch/5)²) of the whole."""
    site, _, model = pool(FACT())
    teacher, batch = MeanTeacher(model, 0.9, warm_up=True), mixed_batch(site)
    with torch.no_grad():
        for parameter in teacher.network.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    loss = [
        FACT(consistency_weight=weight, temperature=1.0).loss(model, teacher, batch, batch.inputs, epoch).item()
        for weight, epoch in ((0.0, 5.0), (2.0, 2.5), (2.0, 5.0), (2.0, 9.0))
    ]
    assert loss[2] == loss[3] > loss[0] + 0.1
    assert loss[1] - loss[0] == pytest.approx(np.exp(-1.25) * (loss[2] - loss[0]), rel=1e-3)


def test_a_teacher_answers_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    answer = MeanTeacher.forward

    def noted(self: MeanTeacher, inputs: torch.Tensor) -> torch.Tensor:
        said.append(self.network.training)
        return answer(self, inputs)

    monkeypatch.setattr(MeanTeacher, "forward", noted)
    site, weights, _ = pool(FACT())
    step(FACT(), site, weights)
    assert said == [True]


def test_batch_norm_sees_both_views_of_fact_together() -> None:
    """Student and teacher alike, as the authors' code; one view alone has other statistics."""
    method = FACT(temperature=1.0)
    site, _, model = pool(method, NORMED_CNN)
    batch, teacher = mixed_batch(site), MeanTeacher(model, 0.9, warm_up=True).train()
    mixed = batch.inputs.flip(0) * 3.0 + 1.0
    with torch.no_grad():
        found = method.loss(model, teacher, batch, mixed, 5.0)
        whole = torch.cat([batch.inputs, mixed])
        plain, other = model(whole).split(len(mixed))
        first, second = teacher.network(whole).split(len(mixed))
        expected = F.cross_entropy(plain, batch.targets) + F.cross_entropy(other, batch.targets)
        for target, student in ((first, other), (second, plain)):
            gap = target.softmax(1) * (target.log_softmax(1) - student.log_softmax(1))
            expected = expected + 2.0 * gap.sum(1).mean()
        assert (model(mixed) - other).abs().max() > 1e-3, "apart it would be another number"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_epoch_of_fact_is_a_whole_number_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = FACT.loss

    def noted(*given: Any) -> torch.Tensor:
        seen.append(given[-1])
        return whole(*given)

    monkeypatch.setattr(FACT, "loss", noted)
    site, weights, _ = pool(FACT())
    step(FACT(), site, weights, steps=13)
    assert site.batches_per_epoch == 6
    assert seen == [0] * 6 + [1] * 6 + [2]


def test_a_teacher_forgets_its_start_and_has_statistics_of_its_own() -> None:
    layer = torch.nn.BatchNorm1d(2)
    teacher = MeanTeacher(layer, 0.9, warm_up=True)
    with torch.no_grad():
        layer.weight.fill_(3.0)
        layer.running_mean.fill_(5.0)  # type: ignore[union-attr]
    teacher.follow(layer)
    assert teacher.network.weight.tolist() == [2.0, 2.0]  # m = ½ in the first step
    assert teacher.network.running_mean.tolist() == [0.0, 0.0]
    slow = MeanTeacher(torch.nn.Linear(1, 1, bias=False), 0.999, warm_up=False)
    start = slow.network.weight.item()
    other = torch.nn.Linear(1, 1, bias=False)
    slow.follow(other)
    assert slow.network.weight.item() == pytest.approx(0.999 * start + 0.001 * other.weight.item(), rel=1e-6)


# JiGen and EISNet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_on", ["ordered", "all"])
def test_a_step_of_jigen_by_hand(class_on: str) -> None:
    method = JiGen(jigsaw_weight=0.4, permutations=5, ordered=0.5, class_on=class_on)
    site, weights, model = pool(method)
    head = method.parts(site, lambda: torch.nn.Linear(model.embedding_size, 6))
    batch = mixed_batch(site)
    inputs, orders = Puzzles(site, 5, 0.5, 0.1).of(batch.inputs)
    assert 0 < int((orders == 0).sum()) < len(orders)
    table = tile_permutations(5)
    for image, shuffled, order in zip(batch.inputs, inputs, orders, strict=True):
        torch.testing.assert_close(shuffled[None], shuffled_tiles(image[None], table[order][None]), atol=1e-5, rtol=0)
    features = model.features(inputs)
    chosen = orders == 0 if class_on == "ordered" else orders >= 0
    loss = F.cross_entropy(model.classifier(features[chosen]), batch.targets[chosen])
    loss = loss + 0.4 * F.cross_entropy(head(features), orders)
    descend(loss, trainable(model, head))
    update = step(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), head)


def test_tiles_lose_their_colour_one_by_one() -> None:
    chosen = torch.zeros(1, 9, dtype=torch.bool)
    chosen[0, 5] = True
    mask = tile_mask(chosen, torch.zeros(1, 3, 6, 6))
    assert mask[0, 0].nonzero().tolist() == [[2, 4], [2, 5], [3, 4], [3, 5]]


@pytest.mark.parametrize("class_on", ["ordered", "all"])
def test_a_step_of_eisnet_by_hand(class_on: str) -> None:
    """The triplets' own numbers are compared with the authors'; here with what they are made of."""
    method = EISNet(
        jigsaw_weight=0.5, metric_weight=0.4, metric_weight_end=0.8, permutations=3, ordered=0.6, class_on=class_on
    )
    site, weights, model = pool(method)
    parts = method.parts(site, lambda: Parts(model, method))
    batch = mixed_batch(site)
    inputs, orders = Puzzles(site, 3, 0.6, 0.1).of(batch.inputs)
    features = model.features(inputs)
    keys = F.normalize(parts.embed(model.features(batch.inputs))).detach()  # the encoder begins as a copy
    apart = momentum_triplet_loss(
        F.normalize(parts.embed(features)), keys, batch.targets, keys, batch.targets, 2.0, 256,
        site.generator_for("triplets"),
    )  # fmt: skip
    chosen = orders == 0 if class_on == "ordered" else orders >= 0
    beta_now = 0.4 + 0.4 / 400  # one of 400 mini-batches is under way
    loss = F.cross_entropy(model.classifier(features[chosen]), batch.targets[chosen])
    loss = loss + 0.5 * F.cross_entropy(parts.jigsaw(features), orders) + beta_now * apart
    descend(loss, trainable(model, parts.jigsaw, parts.embed))
    update = step(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-4)
    assert_same(update.weights, model)
    kept = site.memory.weights("parts")
    torch.testing.assert_close(kept["keys"], keys, atol=1e-5, rtol=1e-4)
    assert torch.equal(kept["labels"], batch.targets)


def test_the_encoder_of_keys_follows_once_a_step_over_rounds() -> None:
    """Halfway each time: e₁ = (θ₀ + θ₁)/2 after the first step, e₂ = (e₁ + θ₂)/2 after the second."""
    method = EISNet(momentum=0.5)
    site, weights, _ = pool(method)
    first = step(method, site, weights).weights
    site.begin(Envelope(2, 2, 0.1, 300))
    second = step(method, site, first).weights
    kept = site.memory.weights("parts")
    for name in (name for name in weights if name.startswith("features.")):
        expected = (weights[name] + first[name]) / 4 + second[name] / 2
        found = kept[name.replace("features.", "encoder.network.0.", 1)]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_queue_keeps_the_newest_keys_and_survives_a_round() -> None:
    method = EISNet(queue=10)
    site, weights, _ = pool(method)
    update = step(method, site, weights, steps=3)  # batches of 8
    kept = site.memory.weights("parts")
    assert kept["keys"].shape == (10, 128)
    assert kept["keys"].norm(dim=1).tolist() == pytest.approx([1.0] * 10, abs=1e-5)
    site.begin(Envelope(2, 2, 0.1, 300))
    step(method, site, update.weights)
    torch.testing.assert_close(site.memory.weights("parts")["keys"][:2], kept["keys"][-2:])
