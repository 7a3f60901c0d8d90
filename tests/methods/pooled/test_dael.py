"""DAEL: a step by hand, who teaches whom, an unsure ensemble, the strong view, and the version without target."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from pooling import SIZES, assert_same, descend, first_batches, fit, pool_of, start, trainable
from pydantic import ValidationError
from tiny import CNN, IMAGE, MLP, VECTOR, domains, plans, run, setting
from torch import Tensor

from fedshift.data.transforms import PRESETS, STRONG, Augmentation, strong_view
from fedshift.experiment.config.experiment import parse
from fedshift.federation.setting_json import setting_from, setting_recipe
from fedshift.federation.site import Site
from fedshift.methods.heads import Experts
from fedshift.methods.pooled.dael import DAEL
from fedshift.models.network import Network


def experts_of(model: Network) -> Any:
    return cast(Experts, model.classifier).heads


def by_hand(model: Network, site: Site, threshold: float, images: bool) -> tuple[Tensor, Tensor, Tensor]:
    """L_x, L_cr and L_u of the first batches, with three sources."""
    sources, target = first_batches(site)
    draws, heads = site.generator_for("strong view"), experts_of(model)

    def strong(inputs: Tensor) -> Tensor:
        return strong_view(inputs, STRONG, site.data.preprocessing, draws) if images else inputs

    views = [strong(batch.inputs) for batch in sources]
    own = consensus = torch.zeros(())
    for number, (batch, view) in enumerate(zip(sources, views, strict=True)):
        said = heads[number](model.features(batch.inputs)).softmax(1)
        own = own - (said[torch.arange(len(said)), batch.targets] + 1e-5).log().mean() / 3
        left, right = (heads[other](model.features(view)).softmax(1) for other in range(3) if other != number)
        consensus = consensus + (((left + right) / 2 - said.detach()) ** 2).sum(1).mean() / 3
    weak = torch.stack([head(model.features(target.inputs)).softmax(1) for head in heads]).detach()
    surest = weak.amax(2).argmax(0)
    labels = weak.argmax(2)[surest, torch.arange(len(surest))]
    sure = weak.amax((0, 2)) >= threshold
    view = model.features(strong(target.inputs))
    mean = sum(head(view).softmax(1) for head in heads) / 3
    unlabelled = -((mean[torch.arange(len(labels)), labels] + 1e-5).log() * sure).mean()  # type: ignore[index]
    return own, consensus, unlabelled


@pytest.mark.parametrize("network", [MLP, CNN], ids=["vectors", "images"])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.4}, {"threshold": 0.4, "unlabelled_weight": 2.0}], ids=str)
def test_a_step_by_hand(options: dict[str, Any], network: dict[str, object]) -> None:
    method = DAEL(**options)
    site, weights = pool_of(method, network), start(method, network)
    model = site.model(weights)
    own, consensus, unlabelled = by_hand(model, site, method.threshold, network is CNN)
    loss = own + consensus + options.get("unlabelled_weight", 0.5) * unlabelled
    assert (unlabelled > 0) == (method.threshold < 0.9)
    descend(loss, trainable(model))
    update = fit(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(update.weights, model)
    assert set(site.memory) <= {"optimizer"}


def test_the_weight_of_the_consensus_multiplies_it() -> None:
    site = pool_of(DAEL())
    model = site.model(start(DAEL()))
    sources, _ = first_batches(site)
    views = [batch.inputs for batch in sources]
    without, once, thrice = (
        DAEL(consensus_weight=weight).source_loss(model, sources, views).item() for weight in (0.0, 1.0, 3.0)
    )
    assert thrice - without == pytest.approx(3 * (once - without), rel=1e-4)
    assert once - without > 1e-3


def test_an_expert_is_taught_by_the_other_domain_and_never_as_the_teacher() -> None:
    """K = 2: L_cr moves expert 0 on the images of domain 1 alone, expert 1's word being constant, and vice versa."""
    sizes = {"north": 9, "south": 8}
    with_it, without = DAEL(), DAEL(consensus_weight=0)
    site = pool_of(with_it, sizes=sizes)
    model = site.model(start(with_it, sizes=sizes))
    heads = experts_of(model)
    sources, _ = first_batches(site)
    views = [batch.inputs for batch in sources]
    consensus = with_it.source_loss(model, sources, views) - without.source_loss(model, sources, views)
    for pupil, teacher in ((0, 1), (1, 0)):
        inputs = sources[teacher].inputs
        word = heads[teacher](model.features(inputs)).softmax(1).detach()
        lesson = ((heads[pupil](model.features(inputs)).softmax(1) - word) ** 2).sum(1).mean() / 2
        expected = torch.autograd.grad(lesson, heads[pupil].weight)[0]
        found = torch.autograd.grad(consensus, heads[pupil].weight, retain_graph=True)[0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_below_the_threshold_the_target_changes_nothing() -> None:
    method = DAEL(threshold=1.0, unlabelled_weight=7.0)
    site, weights = pool_of(method), start(method)
    model = site.model(weights)
    _, target = first_batches(site)
    loss = method.target_loss(model, target, target.inputs)
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, trainable(model), allow_unused=False))
    other = DAEL(unlabelled_weight=0)
    assert fit(method, site, weights).weights == fit(other, pool_of(other), weights).weights


def test_the_version_without_target_serves_domain_generalization() -> None:
    method = DAEL(unlabelled_weight=0)
    assert not method.traits.needs_target
    assert DAEL().traits.needs_target
    assert not plans(method, domains(MLP))[0].unlabelled
    assert method.target_mini_batches(5, 3) == 0
    state, where = run(method, network=MLP, budget=30, rounds=3)
    assert state.round == 3
    assert where.progress.used["pool"] == 30  # steps of three mini-batches
    whole = {"data": "rotated_digits", "model": "mnist_cnn", "protocol": {"kind": "leave_one_out"}}
    parse({**whole, "methods": [{"name": "dael", "unlabelled_weight": 0}]})
    with pytest.raises(Exception, match="dael"):
        parse({**whole, "methods": ["dael"]})


def test_one_source_is_cross_entropy_on_its_own_expert() -> None:
    method, sizes = DAEL(unlabelled_weight=0), {"alone": 12}
    site, weights = pool_of(method, sizes=sizes), start(method, sizes=sizes)
    model = site.model(weights)
    batch = next(site.domain_batches(1))[0][0]
    site.mini_batches = 0
    loss = -(model(batch.inputs).softmax(1)[torch.arange(len(batch.rows)), batch.targets] + 1e-5).log().mean()
    descend(loss, trainable(model))
    assert_same(fit(method, site, weights).weights, model)


def test_the_mean_of_the_experts_answers() -> None:
    method = DAEL()
    model = pool_of(method).model(start(method))
    inputs = torch.rand(4, 5)
    mean = torch.stack([head(model.features(inputs)).softmax(1) for head in experts_of(model)]).mean(0)
    torch.testing.assert_close(model(inputs).softmax(1), mean)
    assert len(experts_of(model)) == len(SIZES)


def test_strong_views() -> None:
    images = (torch.rand(6, 1, 12, 12) - 0.5) / 0.25  # as a network reads values in [0, 1]
    torch.testing.assert_close(strong_view(images, Augmentation(), IMAGE, torch.Generator()), images)
    one, same = (strong_view(images, STRONG, IMAGE, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, same)
    assert one.shape == images.shape
    assert not torch.allclose(one, images, atol=0.1)
    assert one.min() >= -2.0
    assert one.max() <= 2.0
    vectors = torch.rand(3, 5)
    assert strong_view(vectors, STRONG, VECTOR, torch.Generator()) is vectors


def test_options_of_the_strong_view() -> None:
    assert DAEL(strong="digits").strong == PRESETS["digits"]  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="did you mean 'csac'"):
        DAEL(strong="csak")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="threshold"):
        DAEL(threshold=1.5)
    whole = setting(DAEL(strong="kd3a"), domains(MLP), MLP)  # type: ignore[arg-type]
    assert setting_from(setting_recipe(whole)) == whole


def test_pseudo_labels_are_of_the_weak_view() -> None:
    """The strong view learns them, whatever the experts say of itself."""
    method = DAEL(threshold=0.0)
    site = pool_of(method)
    model = site.model(start(method))
    _, target = first_batches(site)
    strong = target.inputs.flip(0) * -3.0
    heads = experts_of(model)
    with torch.no_grad():
        weak, own = (
            torch.stack([head(model.features(inputs)).softmax(1) for head in heads])
            for inputs in (target.inputs, strong)
        )
        surest = weak.amax(2).argmax(0)
        labels = weak.argmax(2)[surest, torch.arange(len(surest))]
        assert not torch.equal(labels, own.argmax(2)[own.amax(2).argmax(0), torch.arange(len(surest))])
        expected = -(own.mean(0)[torch.arange(len(labels)), labels] + 1e-5).log().mean()
        torch.testing.assert_close(method.target_loss(model, target, strong), expected)
