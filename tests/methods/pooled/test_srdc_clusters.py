"""SRDC's clusters: the classes that they are of, where k-means starts, and the labels that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pooling import LEFT, fit, pool_of, start
from test_srdc import sharpened
from tiny import LINEAR, federation, vectors
from torch import Tensor

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Statistics
from fedshift.federation.site import Envelope
from fedshift.methods.pooled import srdc
from fedshift.methods.pooled.srdc import SRDC


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
