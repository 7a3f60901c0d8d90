"""CMSS: a step by hand, no curriculum at equal scores, and which way the curriculum network goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling import LEFT, SIZES, assert_same, binary, descend, first_batches, fit, moved, pool_of, start, trainable
from tiny import CNN, MLP
from torch import Tensor

from fedshift.federation.site import Site
from fedshift.methods.pooled.cmss import CMSS, Parts, curriculum_network
from fedshift.models.network import Network
from fedshift.weights import Weights


def parts_at(method: CMSS, site: Site, model: Network) -> Parts:
    return method.parts(site, lambda: Parts(model.embedding_size, site.data.input_shape, method.width))


def losses(model: Network, parts: Parts, site: Site, *, weighted: bool = True) -> tuple[Tensor, Tensor]:
    """Plain cross-entropy and the weighted adversarial loss on the first batches."""
    sources, target = first_batches(site)
    inputs = torch.cat([batch.inputs for batch in sources])
    features = model.features(inputs)
    error = F.cross_entropy(model.classifier(features), torch.cat([batch.targets for batch in sources]))
    scores = parts.curriculum(inputs)
    weights = len(inputs) * scores.exp() / scores.exp().sum() if weighted else torch.ones_like(scores)
    assert weights.sum().item() == pytest.approx(len(inputs), rel=1e-5)
    told = -(weights * parts.discriminator(features).sigmoid().log()).mean()
    return error, told + binary(parts.discriminator(model.features(target.inputs)), 0.0)


@pytest.mark.parametrize("network", [MLP, CNN], ids=["vectors", "images"])
@pytest.mark.parametrize("options", [{}, {"reversal": 0.4}, {"ramp": True}], ids=str)
def test_a_step_by_hand(options: dict[str, Any], network: dict[str, object]) -> None:
    method = CMSS(width=8, **options)
    strength = options.get("reversal", 1.0) * (math.tanh(5 * 4 / LEFT) if options.get("ramp") else 1)
    site, weights = pool_of(method, network), start(method, network)
    model = site.model(weights)
    parts = parts_at(method, site, model)
    error, adversarial = losses(model, parts, site)
    classifier, discriminator = trainable(model.classifier), trainable(parts.discriminator)
    by_classifier = torch.autograd.grad(error, classifier, retain_graph=True)
    by_discriminator = torch.autograd.grad(adversarial, discriminator, retain_graph=True)
    descend(error - strength * adversarial, trainable(model.features, parts.curriculum))
    with torch.no_grad():
        for parameter, gradient in zip((*classifier, *discriminator), (*by_classifier, *by_discriminator), strict=True):
            parameter -= 0.05 * gradient
    update = fit(method, site, weights)
    assert update.loss == pytest.approx((error + adversarial).item(), rel=1e-5)
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), parts)


def test_constant_scores_are_the_unweighted_loss() -> None:
    method = CMSS(width=8)
    site, weights = pool_of(method), start(method)
    model = site.model(weights)
    parts = parts_at(method, site, model)
    last = parts.curriculum[-1]
    with torch.no_grad():
        last.weight.zero_()  # type: ignore[operator]
        last.bias.fill_(3.0)  # type: ignore[operator]
    site.memory["parts"] = Weights({name: tensor.clone() for name, tensor in parts.state_dict().items()})
    error, adversarial = losses(model, parts, site, weighted=False)
    descend(error - adversarial, trainable(model.features))
    update = fit(method, site, weights)
    assert update.loss == pytest.approx((error + adversarial).item(), rel=1e-5)
    for name, tensor in model.features.state_dict().items():
        torch.testing.assert_close(update.weights[f"features.{name}"], tensor, atol=1e-6, rtol=1e-5)


def test_the_curriculum_raises_what_the_domain_classifier_suffers() -> None:
    """After a step of CM alone the same D finds the weighted samples harder: they look more like the target's."""
    method = CMSS(width=8)
    site = pool_of(method, lr=1.0)
    weights = start(method)
    model = site.model(weights)
    parts = parts_at(method, site, model)
    before = losses(model, parts, site)[1]
    fit(method, site, weights)
    after = site.memory.weights("parts")
    parts.load_state_dict(dict(after.select("curriculum")), strict=False)
    assert losses(model, parts, site)[1] > before
    assert moved(parts.curriculum.state_dict(), parts_at(method, pool_of(method), model).curriculum.state_dict())


def test_without_reversal_neither_features_nor_curriculum_see_the_domains() -> None:
    method = CMSS(width=8, reversal=0.0)
    site, weights = pool_of(method), start(method)
    model = site.model(weights)
    parts = parts_at(method, site, model)
    before = {name: tensor.clone() for name, tensor in parts.state_dict().items()}
    error, _ = losses(model, parts, site)
    descend(error, trainable(model))
    update = fit(method, site, weights)
    assert_same(update.weights, model)
    assert all(name.startswith("discriminator") for name in moved(before, site.memory.weights("parts")))


@pytest.mark.parametrize("shape", [(5,), (1, 12, 12), (3, 7, 9)])
def test_curriculum_networks_give_one_score_per_sample(shape: tuple[int, ...]) -> None:
    assert curriculum_network(shape, 4)(torch.rand(6, *shape)).shape == (6, 1)


def test_a_source_batch_is_of_all_sources() -> None:
    site = pool_of(CMSS())
    sources, _ = first_batches(site)
    assert [set(batch.domains.tolist()) for batch in sources] == [{0}, {1}, {2}]
    assert len(SIZES) == 3
