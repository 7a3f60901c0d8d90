"""SRDC: a step by hand in the first round and in a later one, its clusters and where they start, its options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pooling import LEFT, SIZES, assert_same, first_batches, fit, pool_of, start, trainable
from tiny import LINEAR, MLP, domains, federation, vectors
from torch import Tensor
from torch.nn import functional

from fedshift.data.domain import Domain
from fedshift.errors import UserError
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Statistics
from fedshift.federation.site import Envelope
from fedshift.functional.schedules import ramp
from fedshift.methods.pooled import srdc
from fedshift.methods.pooled.srdc import SRDC

WORK = len(SIZES) + 1


def cross_entropy(labels: Tensor, probabilities: Tensor) -> Tensor:
    return -(labels * probabilities.log()).sum(1).mean()


def sharpened(p: Tensor) -> Tensor:
    q = p.detach() / p.detach().sum(0).sqrt()
    return q / q.sum(1, keepdim=True)


@pytest.mark.parametrize("later", [False, True])
def test_a_step_by_hand(later: bool) -> None:
    method = SRDC(beta=0.6, embedding_weight=0.8, setting="released", detach=True)
    site, weights = pool_of(method), start(method)
    means = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    if later:
        site.memory["centres"] = Statistics({"centres": means})
    sources, target = first_batches(site)
    model = site.model(weights)
    clusters, centres, _ = method._clusters(site, model)
    update = fit(method, site, weights)

    rate = ramp(WORK / LEFT)
    inputs, labels = torch.cat([b.inputs for b in sources]), torch.cat([b.targets for b in sources])
    moving = centres.clone().requires_grad_()
    features, at_target = model.features(inputs), model.features(target.inputs)

    def assigned(rows: Tensor) -> Tensor:
        return (1 / (1 + (rows[:, None] - moving[None]).square().sum(2))).softmax(1)

    own = functional.one_hot(clusters[target.rows], 3).float()

    def truth(p: Tensor) -> Tensor:
        return 0.4 * own + 0.6 * sharpened(p) if later else own

    p, soft = model.classifier(at_target).softmax(1), assigned(at_target)
    weight = (1 + functional.cosine_similarity(features.detach(), centres[labels])) / 2
    of_source = -assigned(features).log()[torch.arange(len(labels)), labels]
    plain = functional.cross_entropy(model.classifier(features), labels, reduction="none")
    loss = rate * (cross_entropy(truth(p), p) + 0.8 * cross_entropy(truth(soft), soft))
    loss = loss + (weight * plain).mean() + rate * 0.8 * (weight * of_source).mean()
    assert update.loss == pytest.approx(loss.item(), abs=1e-5)
    for parameter, slope in zip(trainable(model), torch.autograd.grad(loss, trainable(model)), strict=True):
        parameter.data -= 0.05 * slope
    assert_same(update.weights, model)
    # What the next k-means starts from are this one's centres, before training moved them.
    kept = site.memory["centres"]
    assert isinstance(kept, Statistics)
    torch.testing.assert_close(kept["centres"], centres)


def test_clusters_have_the_numbers_of_the_classes() -> None:
    """Far apart classes: k-means from the sources' means finds the target's classes, without a look at its labels."""
    method = SRDC()
    site = pool_of(method, network={"name": "linear"})
    clusters, centres, auxiliary = method._clusters(site, site.model())
    torch.testing.assert_close(auxiliary.sum(2), torch.ones(2, len(clusters)))
    assert site.unlabelled is not None
    assert (clusters == site.unlabelled.labels).double().mean() > 0.9
    assert centres.shape == (3, 5)


def test_a_class_without_source_samples_takes_no_part_and_a_tiny_target_is_no_obstacle() -> None:
    method = SRDC()
    found = domains(MLP, {"north": 2, "south": 1})  # classes 0 and 1 alone
    where = federation(method, found, MLP)
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, LEFT))
    clusters, *_ = method._clusters(site, site.model())
    assert set(clusters.tolist()) <= {0, 1}
    assert site.unlabelled is not None
    site.unlabelled._rows = site.unlabelled._rows[:1]
    assert method._clusters(site, site.model())[0].shape == (1,)


def test_labels_of_the_target_stand_still_within_a_round() -> None:
    """Predictions of now over sums of the round's beginning would drive a rare class up without an end."""
    method = SRDC(embedding_weight=0, source_selection=False)
    site = pool_of(method)
    site.memory["centres"] = Statistics({"centres": torch.eye(3, 6)})
    site.begin(Envelope(2, 2, 1.0, LEFT))
    model = site.model(start(method))
    expected = method._clusters(site, model)[2][0]
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        original = srdc.soft_cross_entropy
        patch.setattr(srdc, "soft_cross_entropy", lambda q, p: (seen.append(q), original(q, p))[1])
        fit(method, site, start(method), steps=6)
    assert len(seen) > 2
    rows = {tuple(row.tolist()) for row in expected}
    assert all(tuple(row.tolist()) in rows for q in seen for row in q)


def test_labels_of_the_whole_target_have_no_gradient() -> None:
    method = SRDC(detach=False)
    with pytest.raises(UserError, match="write auxiliary: batch"):
        method.check(pool_of(SRDC()).model())


# Clusters -------------------------------------------------------------------------------------------------------------


def without_the_first_class(name: str, number: int) -> Domain:
    whole = vectors(name, number)
    rows = whole.labels > 0
    return Domain(name, whole.inputs[rows], whole.labels[rows])


def test_clusters_are_of_the_classes_that_sources_have() -> None:
    """Sources know the second and the third class alone: the target's samples of these get just these numbers."""
    method, found = SRDC(), [without_the_first_class(name, 18) for name in ("north", "south")]
    where = federation(method, found, LINEAR)
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    assert site.unlabelled is not None
    site.unlabelled._rows = np.flatnonzero(vectors("target", 14).labels > 0)
    site.begin(Envelope(1, 1, 0.0, LEFT))
    clusters, centres, _ = method._clusters(site, site.model())
    truth = vectors("target", 14).labels
    assert clusters.tolist() == truth[truth > 0].tolist()
    for cluster in (1, 2):
        mean = vectors("target", 14).inputs[truth == cluster].mean(0)
        torch.testing.assert_close(centres[cluster], torch.from_numpy(mean), atol=1e-5, rtol=1e-5)


def test_a_later_round_starts_from_the_centres_of_the_one_before() -> None:
    """Kept centres with their numbers moved on by one: so are the clusters, whatever the sources' means are."""
    method = SRDC()
    site = pool_of(method, LINEAR)
    first, centres, _ = method._clusters(site, site.model())
    site.memory["centres"] = Statistics({"centres": centres.roll(1, 0)})
    then, moved, _ = method._clusters(site, site.model())
    assert len(first.unique()) == 3
    assert then.tolist() == ((first + 1) % 3).tolist()
    torch.testing.assert_close(moved, centres.roll(1, 0))


def test_predictions_and_assignments_have_labels_of_their_own() -> None:
    """q of the whole target, by hand: of softmax outputs for the first term, of distances to centres for the second."""
    method = SRDC(source_selection=False)
    site, weights = pool_of(method), start(method)
    site.memory["centres"] = Statistics({"centres": torch.eye(3, 6)})
    site.begin(Envelope(2, 2, 0.5, LEFT))
    model = site.model(weights)
    _, centres, _ = method._clusters(site, model)
    assert site.unlabelled is not None
    with torch.no_grad():
        features = torch.cat([model.features(inputs) for inputs, _, _ in site.unlabelled.all_batches(500)])
        distances = (features[:, None] - centres[None]).square().sum(2)
        expected = [sharpened(model.classifier(features).softmax(1)), sharpened((1 / (1 + distances)).softmax(1))]
    assert (expected[0] - expected[1]).abs().max() > 0.01, "a mix-up would not show"
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        original = srdc.soft_cross_entropy
        patch.setattr(srdc, "soft_cross_entropy", lambda q, p: (seen.append(q), original(q, p))[1])
        fit(method, site, weights, steps=2)
    assert len(seen) == 4
    for number, found in enumerate(seen):
        nearest = (found[:, None] - expected[number % 2][None]).abs().amax(2).amin(1)
        assert nearest.max() < 1e-5, number
