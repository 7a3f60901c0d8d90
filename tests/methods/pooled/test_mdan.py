"""MDAN: a step by hand under both rules, what it is without domain losses, and how a pool counts its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling import assert_same, binary, descend, first_batches, fit, moved, pool_of, start, trainable
from tiny import MLP, federation, run, start_of, step_on
from torch import nn

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.methods.pooled.mdan import MDAN, combine_domains
from fedshift.models.network import Network


def parts_at(method: MDAN, site: Site, model: Network) -> nn.ModuleList:
    number = site.domains
    return method.parts(site, lambda: nn.ModuleList(nn.Linear(model.embedding_size, 1) for _ in range(number)))


@pytest.mark.parametrize("reversal", [1.0, 0.3])
@pytest.mark.parametrize("rule", ["dynamic", "maxmin"])
def test_a_step_by_hand(rule: Any, reversal: float) -> None:
    """Features go down ℓ_k − reversal·μ·d_k, the classifier down ℓ_k, identifier k down μ·d_k, each by its weight."""
    method, mu, gamma = MDAN(rule=rule, mu=0.7, gamma=3.0, reversal=reversal), 0.7, 3.0
    site, weights = pool_of(method), start(method)
    model = site.model(weights)
    identifiers = parts_at(method, site, model)
    sources, target = first_batches(site)
    at_target = model.features(target.inputs)
    errors, tellings = [], []
    for batch, identifier in zip(sources, identifiers, strict=True):
        features = model.features(batch.inputs)
        errors.append(F.cross_entropy(model.classifier(features), batch.targets))
        tellings.append(binary(identifier(features), 1.0) + binary(identifier(at_target), 0.0))
    source, domain = torch.stack(errors), torch.stack(tellings)
    if rule == "dynamic":
        by_source = by_domain = (gamma * (source + mu * domain)).softmax(0).detach()
        loss = (gamma * (source + mu * domain)).exp().sum().log() / gamma
    else:
        by_source = F.one_hot(source.argmax(), 3).float()
        by_domain = F.one_hot(domain.argmin(), 3).float()
        loss = source.max() + mu * domain.min()
    of_features = (by_source * source).sum() - reversal * mu * (by_domain * domain).sum()
    of_others = (by_source * source).sum() + mu * (by_domain * domain).sum()
    others = trainable(model.classifier, identifiers)
    gradients = torch.autograd.grad(of_others, others, retain_graph=True)
    descend(of_features, trainable(model.features))
    with torch.no_grad():
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter -= 0.05 * gradient
    update = fit(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), identifiers)


@pytest.mark.parametrize("rule", ["dynamic", "maxmin"])
def test_one_source_without_domain_loss_is_plain_cross_entropy(rule: Any) -> None:
    method, sizes = MDAN(rule=rule, mu=0), {"alone": 12}
    site, weights = pool_of(method, sizes=sizes), start(method, sizes=sizes)
    model = site.model(weights)
    before = parts_at(method, site, model).state_dict()
    (batch,), _ = first_batches(site)
    descend(F.cross_entropy(model(batch.inputs), batch.targets), trainable(model))
    update = fit(method, site, weights)
    assert_same(update.weights, model)
    assert not moved(before, site.memory.weights("parts"))


def test_a_step_uses_a_batch_of_every_domain_and_rounds_end_together() -> None:
    """30 mini-batches over three rounds in steps of 4: 8, 20 and, the last one over, 32."""
    method = MDAN()
    where = federation(method, network=MLP, budget=30, rounds=3)
    assert isinstance(where, LocalFederation)
    state, used = method.start(where, start_of(method, network=MLP)), []
    for _ in range(3):
        assert not where.is_exhausted()
        state = step_on(method, where, state)
        used.append(where.progress.used["pool"])
    assert used == [8, 20, 32]
    assert where.is_exhausted()
    assert run(method, network=MLP, budget=2, rounds=2)[1].progress.used["pool"] == 4
    assert MDAN(local_epochs=3).mini_batches(10, 4) == MDAN(local_epochs=3).target_mini_batches(10, 4) == 120


def test_progress_counts_within_a_round() -> None:
    method = MDAN()
    site = pool_of(method)
    site.begin(type(site.envelope)(2, 2, 0.5, 40))
    assert method.progress(site) == 0.5
    assert [method.progress(site) for _ in method.with_target(site, 12)] == pytest.approx([0.55, 0.6, 0.65])


def test_the_hard_version_is_the_limit_of_the_soft_one() -> None:
    """max_k (l_k + mu d_k); the code's takes the largest error and the smallest domain loss of different sources."""
    errors, apart = torch.tensor([1.0, 2.0, 1.5]), torch.tensor([9.0, 1.0, 8.0])
    assert combine_domains(errors, apart, 0.5, rule="hard").item() == 5.5
    assert combine_domains(errors, apart, 0.5, 1e4, "dynamic").item() == pytest.approx(5.5, abs=1e-3)
    assert combine_domains(errors, apart, 0.5, rule="maxmin").item() == 2.5
