"""M3SDA: steps A, B and C by hand, what each leaves alone, and the pairs of classifiers."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import pytest
import torch.nn.functional as F
from pooling import assert_same, descend, first_batches, fit, moved, pool_of, start, trainable
from torch import Tensor, nn

from fedshift.federation.site import Site
from fedshift.methods.heads import Experts, redrawn
from fedshift.methods.pooled.m3sda import M3SDA, step_loss
from fedshift.models.network import Network


def both_at(method: M3SDA, site: Site) -> tuple[Network, nn.ModuleList, nn.ModuleList]:
    model = site.model(start(method))
    heads = cast(Experts, model.classifier).heads
    return model, heads, method.parts(site, lambda: nn.ModuleList(redrawn(head) for head in heads))


def errors(model: Network, heads: nn.ModuleList, rivals: nn.ModuleList, site: Site) -> Tensor:
    terms = []
    for head, rival, batch in zip(heads, rivals, first_batches(site)[0], strict=True):
        features = model.features(batch.inputs)
        terms.append(F.cross_entropy(head(features), batch.targets) + F.cross_entropy(rival(features), batch.targets))
    return sum(terms) / 3  # type: ignore[return-value]


def gap(model: Network, heads: nn.ModuleList, rivals: nn.ModuleList, site: Site) -> Tensor:
    features = model.features(first_batches(site)[1].inputs)
    gaps = [(h(features).softmax(1) - r(features).softmax(1)).abs().mean() for h, r in zip(heads, rivals, strict=True)]
    return sum(gaps) / 3  # type: ignore[return-value]


def distance(model: Network, site: Site, moments: str) -> Tensor:
    sources, target = first_batches(site)
    features = [model.features(batch.inputs) for batch in (*sources, target)]
    second = (lambda f: f.var(0)) if moments == "mean_variance" else (lambda f: f.pow(2).mean(0))

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return (a.mean(0) - b.mean(0)).norm() + (second(a) - second(b)).norm()

    if moments == "mean_variance":
        return sum(apart(a, b) for a, b in combinations(features, 2)) / 12  # type: ignore[return-value]
    to_target = sum(apart(features[source], features[3]) for source in range(3)) / 3
    return to_target + (apart(*features[:2]) + apart(*features[1:3]) + apart(features[0], features[2])) / 3


@pytest.mark.parametrize(
    ("options", "moments", "weight"),
    [({"moment_weight": 0.3}, "raw", 0.3), ({}, "raw", 5e-4), ({"setting": "reimplementation"}, "mean_variance", 0.5)],
    ids=str,
)
def test_a_step_by_hand(options: dict[str, Any], moments: str, weight: float) -> None:
    method = M3SDA(generator_steps=2, **options)
    site = pool_of(method)
    model, heads, rivals = both_at(method, site)
    first = errors(model, heads, rivals, site) + weight * distance(model, site, moments)
    descend(first, trainable(model, rivals))
    descend(errors(model, heads, rivals, site) - gap(model, heads, rivals, site), trainable(heads, rivals))
    for _ in range(2):
        descend(gap(model, heads, rivals, site), trainable(model.features))
    update = fit(method, site, start(method))
    assert update.loss == pytest.approx(first.item(), rel=1e-5)
    assert_same(update.weights, model)
    assert_same(site.memory.weights("parts"), rivals)


def test_pairs_with_the_target_weigh_other_than_pairs_of_sources() -> None:
    """Of three sources all pairs weigh alike; of two those with the target have half the weight."""
    method = M3SDA(moment_weight=10.0)
    site = pool_of(method)
    model, heads, rivals = both_at(method, site)
    (first, second, _), target = first_batches(site)
    x, y, t = (model.features(batch.inputs) for batch in (first, second, target))

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return (a.mean(0) - b.mean(0)).norm() + (a.pow(2).mean(0) - b.pow(2).mean(0)).norm()

    judged = zip((heads[0], rivals[0], heads[1], rivals[1]), (x, x, y, y), strict=True)
    labels = (first.targets, first.targets, second.targets, second.targets)
    error = sum(F.cross_entropy(head(f), known) for (head, f), known in zip(judged, labels, strict=True)) / 2
    wanted = error + 10 * ((apart(x, t) + apart(y, t)) / 2 + apart(x, y))
    assert step_loss(method, "A", model, rivals, [first, second], target).item() == pytest.approx(
        wanted.item(), rel=1e-5
    )


def test_step_b_leaves_the_features_alone_and_step_c_the_classifiers() -> None:
    method = M3SDA()
    site = pool_of(method)
    model, heads, rivals = both_at(method, site)
    features, classifiers = trainable(model.features), trainable(heads, rivals)
    for phase, still, goes in (("B", features, classifiers), ("C", classifiers, features)):
        model.zero_grad()
        rivals.zero_grad()
        step_loss(method, phase, model, rivals, *first_batches(site)).backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is None for parameter in still)
        assert all(parameter.grad is not None for parameter in goes)


def test_they_stay_alone_with_momentum() -> None:
    """A momentum from step A moves nothing in the steps that leave a parameter alone."""
    shared: dict[str, Any] = {"momentum": 0.9}
    one, two = (pool_of(M3SDA(generator_steps=steps), **shared) for steps in (0, 3))
    first, second = (fit(M3SDA(generator_steps=steps), site, start(M3SDA())) for site, steps in ((one, 0), (two, 3)))
    assert all(name.startswith("features") for name in moved(first.weights, second.weights))
    assert one.memory.weights("parts") == two.memory.weights("parts")
