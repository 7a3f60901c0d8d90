"""SRDC: a step by hand in the first round and in a later one, its clusters and where they start, its options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pooling import LEFT, SIZES, assert_same, first_batches, fit, pool_of, start, trainable
from tiny import LINEAR, MLP, NORMED, domains, federation, vectors
from torch import Tensor
from torch.nn import functional

from fedshift.data.domain import Domain
from fedshift.errors import UserError
from fedshift.federation.local.in_process import LocalFederation
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
    method = SRDC(beta=0.6, embedding_weight=0.8, setting="released", detach=True, source_selection=True)  # type: ignore
    site, weights = pool_of(method), start(method)
    begun = 0.5 if later else 0.0
    site.begin(Envelope(2, 2, begun, LEFT))
    sources, target = first_batches(site)
    model = site.model(weights)
    found = method.cluster_target(site, model, not later)
    clusters, centres = found.clusters, found.centres
    update = fit(method, site, weights)

    rate = ramp(begun + (1 - begun) * WORK / LEFT)
    inputs, labels = torch.cat([b.inputs for b in sources]), torch.cat([b.targets for b in sources])
    moving = centres.clone().requires_grad_()
    features, at_target = model.features(inputs), model.features(target.inputs)

    def assigned(rows: Tensor) -> Tensor:
        return (1 / (1 + (rows[:, None] - moving[None]).square().sum(2))).softmax(1)

    own = functional.one_hot(clusters[target.rows], 3).float()

    def truth(p: Tensor) -> Tensor:
        return 0.4 * own + 0.6 * sharpened(p) if later else own

    p, soft = model.classifier(at_target).softmax(1), assigned(at_target)
    # The network has no BatchNorm and no dropout, so features are those of evaluation mode.
    weight = (1 + functional.cosine_similarity(features.detach(), centres[labels])) / 2 if later else torch.ones(())
    of_source = -assigned(features).log()[torch.arange(len(labels)), labels]
    plain = functional.cross_entropy(model.classifier(features), labels, reduction="none")
    loss = rate * (cross_entropy(truth(p), p) + 0.8 * cross_entropy(truth(soft), soft))
    loss = loss + (weight * plain).mean() + rate * 0.8 * (weight * of_source).mean()
    assert update.loss == pytest.approx(loss.item(), abs=1e-5)
    for parameter, slope in zip(trainable(model), torch.autograd.grad(loss, trainable(model)), strict=True):
        parameter.data -= 0.05 * slope
    assert_same(update.weights, model)


def test_centres_move_at_their_own_rate() -> None:
    """Two steps of a network that stands still: 1e-12 of a step is nothing, and 5e10 times that is 0.05."""
    method = SRDC(centre_rate=5e10, embedding_weight=0.8, source_selection=False)
    site, weights = pool_of(method, lr=1e-12), start(method)
    model = site.model(weights)
    found = method.cluster_target(site, model, True)
    drawn = list(site.domain_batches(2))
    site.mini_batches = 0
    centres, losses = found.centres.clone().requires_grad_(), []
    for number, (sources, target) in enumerate(drawn, 1):
        assert target is not None
        inputs, labels = torch.cat([b.inputs for b in sources]), torch.cat([b.targets for b in sources])
        own = functional.one_hot(found.clusters[target.rows], 3).float()
        assigned = [
            (1 / (1 + (model.features(rows)[:, None] - centres[None]).square().sum(2))).softmax(1)
            for rows in (inputs, target.inputs)
        ]
        embedded = functional.nll_loss(assigned[0].log(), labels) + cross_entropy(own, assigned[1])
        rate = ramp(number * WORK / LEFT)
        loss = functional.cross_entropy(model(inputs), labels)
        loss = loss + rate * (cross_entropy(own, model(target.inputs).softmax(1)) + 0.8 * embedded)
        losses.append(loss.item())
        (slope,) = torch.autograd.grad(loss, centres)
        assert slope.abs().max() > 1e-3
        centres = (centres - 0.05 * slope).detach().requires_grad_()
    site.begin(Envelope(1, 1, 0.0, LEFT))
    assert fit(method, site, weights, steps=2).loss == pytest.approx(sum(losses) / 2, abs=1e-6)


def test_a_class_without_source_samples_takes_no_part_and_a_tiny_target_is_no_obstacle() -> None:
    method = SRDC()
    found = domains(MLP, {"north": 2, "south": 1})  # classes 0 and 1 alone
    where = federation(method, found, MLP)
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, LEFT))
    clusters = method.cluster_target(site, site.model(), True).clusters
    assert set(clusters.tolist()) <= {0, 1}
    assert site.unlabelled is not None
    site.unlabelled._rows = site.unlabelled._rows[:1]
    assert method.cluster_target(site, site.model(), True).clusters.shape == (1,)


def test_labels_of_the_whole_target_have_no_gradient() -> None:
    method = SRDC(detach=False)
    with pytest.raises(UserError, match="write auxiliary: batch"):
        method.check(pool_of(SRDC()).model())


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
    found = method.cluster_target(site, site.model(), True)
    clusters, centres = found.clusters, found.centres
    truth = vectors("target", 14).labels
    assert clusters.tolist() == truth[truth > 0].tolist()
    for cluster in (1, 2):
        mean = vectors("target", 14).inputs[truth == cluster].mean(0)
        torch.testing.assert_close(centres[cluster], torch.from_numpy(mean), atol=1e-5, rtol=1e-5)


def test_a_later_round_starts_from_the_classes_that_are_predicted_now() -> None:
    """A classifier whose classes are moved on by one: so are the clusters, whatever the sources' means are."""
    method = SRDC()
    site = pool_of(method, LINEAR)
    model = site.model()
    first = method.cluster_target(site, model, True)
    assert len(first.clusters.unique()) == 3
    with torch.no_grad():  # as near to a class as to its centre: its logits are those of the nearest mean
        model.classifier.weight.copy_(2 * first.centres.roll(1, 0))  # type: ignore[operator, arg-type]
        model.classifier.bias.copy_(-first.centres.roll(1, 0).square().sum(1))  # type: ignore[operator, arg-type]
    then = method.cluster_target(site, model, False)
    assert then.clusters.tolist() == ((first.clusters + 1) % 3).tolist()
    torch.testing.assert_close(then.centres, first.centres.roll(1, 0))
    assert not torch.equal(method.cluster_target(site, model, True).clusters, then.clusters)


def test_the_run_s_first_round_alone_starts_from_the_sources() -> None:
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        original = SRDC.cluster_target
        patch.setattr(SRDC, "cluster_target", lambda *given: (seen.append(given[-1]), original(*given))[1])
        method = SRDC()
        site = pool_of(method)
        for exchange, progress in enumerate((0.0, 0.1, 0.6), 1):
            site.begin(Envelope(exchange, exchange, progress, LEFT))
            fit(method, site, start(method))
    assert seen == [True, False, False]


def test_clusters_are_of_the_network_in_evaluation_mode() -> None:
    """It normalises by its running statistics, which stay as they are, and trains afterwards."""
    method = SRDC()
    site = pool_of(method, NORMED)
    model = site.model().train()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(0.7)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = method.cluster_target(site, model, False)
    assert model.training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert site.unlabelled is not None
    model.eval()
    with torch.no_grad():
        features = torch.cat([model.features(inputs) for inputs, _, _ in site.unlabelled.all_batches(500)])
        expected = sharpened(model.classifier(features).softmax(1))
    torch.testing.assert_close(found.auxiliary[0], expected)


def test_predictions_and_assignments_have_labels_of_their_own() -> None:
    """q of the whole target, by hand: of softmax outputs for the first term, of distances to centres for the second."""
    method = SRDC(source_selection=False)
    site, weights = pool_of(method), start(method)
    site.begin(Envelope(2, 2, 0.5, LEFT))
    model = site.model(weights)
    centres = method.cluster_target(site, model, False).centres
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
