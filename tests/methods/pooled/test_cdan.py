"""CDAN+E: a step by hand, its readings, and that the features fool the domain classifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pooling import LEFT, SIZES, assert_same, descend, first_batches, fit, pool_of, start, trainable
from torch import Tensor
from torch.nn import functional

from fedshift.functional.schedules import ramp
from fedshift.methods.pooled.cdan import CDAN, Parts

WORK = len(SIZES) + 1


def judged(
    parts: Parts, features: Tensor, logits: Tensor, value: float, entropy_conditioning: bool
) -> tuple[Tensor, Tensor]:
    """Weighted binary cross-entropy of one side, once for D and once for the features."""
    p = logits.softmax(1)
    product = torch.stack([torch.outer(*pair).flatten() for pair in zip(p.detach(), features, strict=True)])
    each = functional.binary_cross_entropy_with_logits(
        parts.discriminator(product), torch.full((len(p), 1), value), reduction="none"
    ).flatten()
    if not entropy_conditioning:
        return each.mean(), p
    weights = 1 + (p * (p + 1e-5).log()).sum(1).exp()
    return (weights / weights.sum().detach() * each).sum(), p


@pytest.mark.parametrize(("setting", "share"), [("paper", 1.0), ("released", 0.1)])
@pytest.mark.parametrize("entropy_conditioning", [True, False])
def test_a_step_by_hand(entropy_conditioning: bool, setting: str, share: float) -> None:
    method = CDAN(
        setting=setting, width=6, dropout=0, entropy_conditioning=entropy_conditioning, adversarial_weight=0.7
    )
    site, weights = pool_of(method), start(method)
    sources, target = first_batches(site)
    update = fit(method, site, weights)

    again = pool_of(method)
    model, parts = again.model(weights), method.parts(again, lambda: Parts(method, 6, 3))
    strength = ramp(WORK / LEFT / share)
    inputs, labels = torch.cat([b.inputs for b in sources]), torch.cat([b.targets for b in sources])
    features, at_target = model.features(inputs), model.features(target.inputs)
    logits, others = model.classifier(features), model.classifier(at_target)
    source, _ = judged(parts, features, logits, 1.0, entropy_conditioning)
    other, _ = judged(parts, at_target, others, 0.0, entropy_conditioning)
    adversarial = 0.7 * (source + other) / 2
    plain = functional.cross_entropy(logits, labels)
    assert update.loss == pytest.approx((plain + adversarial).item(), abs=1e-5)
    # The network climbs what D descends, as strongly as the ramp says.
    whole = plain - strength * adversarial
    parameters = trainable(model)
    slopes = torch.autograd.grad(whole, parameters, retain_graph=True)
    descend(adversarial, trainable(parts))
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter -= 0.05 * slope
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), parts)


@pytest.mark.parametrize(("projection", "inputs"), [("auto", 18), ("outer", 18), ("random", 7)])
def test_where_the_projection_is_drawn(projection: Any, inputs: int) -> None:
    parts = Parts(CDAN(projection=projection, projected=7, width=4), 6, 3)
    assert parts.discriminator[0].in_features == inputs
    assert (parts.projections is None) == (inputs == 18)
    assert Parts(CDAN(projected=7, width=4), 2048, 3).projections is not None


def test_a_random_projection_does_not_train() -> None:
    method = CDAN(projection="random", projected=7, width=4)
    site = pool_of(method)
    fit(method, site, start(method))
    first = dict(site.memory.weights("parts"))
    fit(method, site, start(method), steps=3)
    second = site.memory.weights("parts")
    assert torch.equal(first["of_features"], second["of_features"])
    assert not torch.equal(first["discriminator.0.weight"], second["discriminator.0.weight"])
