"""MDFNet, which has no public code, against a derivation from the paper alone: `mdfnet_by_hand`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mdfnet_by_hand as paper
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import MLP, domains, federation, start_of
from torch import Tensor

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.functional.averaging import weighted_average
from fedshift.functional.schedules import inverse_power
from fedshift.methods.federated.mdfnet import (
    MDFNet,
    _Halves,
    collaborative_shares,
    progressive_weight,
    spherical_kmeans,
)
from fedshift.methods.masks import Mask
from fedshift.weights import Weights

NAMES = {
    "E1": "features.encoder.hidden1.0.weight",
    "e1": "features.encoder.hidden1.0.bias",
    "E2": "features.encoder.hidden2.0.weight",
    "e2": "features.encoder.hidden2.0.bias",
    "C": "classifier.weight",
    "c": "classifier.bias",
    "invariant": "features.mask.logits",
    "D1": "decoder.0.weight",
    "d1": "decoder.0.bias",
    "D2": "decoder.2.weight",
    "d2": "decoder.2.bias",
    "specific": "mask.logits",
}
THRESHOLD = 0.345
"""Between the predictions' largest probabilities, so that some samples count and some do not."""


def numbers(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().numpy()


def named(*parts: Weights) -> dict[str, NDArray[np.float64]]:
    """The parameters of a site by the derivation's names."""
    joined = {name: tensor for part in parts for name, tensor in part.items()}
    return {short: numbers(joined[name]) for short, name in NAMES.items()}


class Recorder:
    """Which mini-batches a site draws, and which of a mask's numbers are 1."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        self.masks: list[NDArray[np.float64]] = []
        draw, pass_on = site.batches, Mask.forward

        def batches(*args: Any, **options: Any) -> Iterator[Batch]:
            for batch in draw(*args, **options):
                self.batches.append(batch)
                yield batch

        def forward(mask: Mask, features: Tensor) -> Tensor:
            masked = pass_on(mask, features)
            if mask.training:  # where a feature is 0 its mask plays no part
                self.masks.append((masked.detach() != 0).double().numpy())
            return masked

        monkeypatch.setattr(site, "batches", batches)
        monkeypatch.setattr(Mask, "forward", forward)


@pytest.mark.parametrize("role", ["labelled", "unlabelled"])
def test_an_epoch_of_a_site(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second one, so that the momentum and what stays at the site are those of the first."""
    method, found = MDFNet(threshold=THRESHOLD, decoder=5), domains(MLP, {"north": 24, "south": 24})
    where = federation(method, found, MLP, rounds=5, momentum=0.9, weight_decay=0.0, batch_size=8, lr=0.05)
    assert isinstance(where, LocalFederation)
    weights = start_of(method, found, MLP)
    site = where._runners["north" if role == "labelled" else "target"].site
    call = method.fit if role == "labelled" else method.fit_unlabelled
    recorder = Recorder(site, monkeypatch)
    velocity: dict[str, Any] = {}
    for number, r in ((1, 0.0), (2, 0.25)):
        site.begin(Envelope(number, number, r, 60))
        if number == 1:
            site.memory["private"] = site.weights_of(_Halves(method, site, weights).private)
            weights = undecided(weights, site)
        parts = named(weights, site.memory.weights("private"))
        labels = None
        if role == "unlabelled":
            g = invariant(parts, site)
            predicted = paper.predictions(parts, g).argmax(1)
            labels = paper.pseudo_labels(g, predicted, site.classes)
            assert len(set(labels.tolist())) > 1
        recorder.batches.clear()
        recorder.masks.clear()
        update = call(site, weights, r=r, extra=0)
        losses, sure = [], []
        rate = paper.learning_rate(r) / 0.01 * 0.05  # of 0.01 in the paper
        draws = zip(recorder.masks[::2], recorder.masks[1::2], strict=True)
        for batch, masks in zip(recorder.batches, draws, strict=True):
            truth = batch.targets.numpy() if labels is None else labels[batch.rows.numpy()]
            threshold = None if labels is None else THRESHOLD
            loss, gradients = paper.client(parts, numbers(batch.inputs), masks, truth, threshold)
            losses.append(loss)
            masked = paper.embedding(parts, numbers(batch.inputs)) * masks[0]
            sure += (paper.predictions(parts, masked).max(1) >= THRESHOLD).tolist()
            for name, gradient in gradients.items():
                velocity[name] = 0.9 * velocity.get(name, 0.0) + gradient
                parts[name] = parts[name] - rate * velocity[name]
        assert len(losses) == -(-len(sure) // 8) > 1
        assert 0 < sum(sure) < len(sure)
        assert update.loss == pytest.approx(np.mean(losses), abs=1e-6)
        weights = update.weights
        ours = named(weights, site.memory.weights("private"))
        for name, expected in parts.items():
            np.testing.assert_allclose(ours[name], expected, atol=2e-6, err_msg=name)


def invariant(parts: dict[str, NDArray[np.float64]], site: Site) -> NDArray[np.float64]:
    """g^I of all samples of a site; masks are their chances where nothing is drawn."""
    inputs = numbers(torch.cat([batch.inputs for batch in site.all_batches()]))
    return paper.embedding(parts, inputs) * paper.sigmoid(parts["invariant"])


def undecided(weights: Weights, site: Site) -> Weights:
    """With a bias by which the site's samples are of several classes to the model."""
    parts = named(weights, site.memory.weights("private"))
    bias = -parts["C"] @ invariant(parts, site).mean(0)
    return Weights({**weights, "classifier.bias": torch.from_numpy(bias).float()})


def test_clusters() -> None:
    """Of points between directions, some so near to two that the first pass does not settle them; class 3 has none."""
    draws = np.random.default_rng(0)
    for _ in range(20):
        features = np.abs(draws.normal(size=(40, 5))) + 0.01
        predicted = draws.integers(0, 3, size=40)
        ours = spherical_kmeans(torch.from_numpy(features), torch.from_numpy(predicted), 4).labels.numpy()
        np.testing.assert_array_equal(ours, paper.pseudo_labels(features, predicted, 4))
        assert set(ours.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("r", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("labelled", "unlabelled"), [(1, 1), (2, 1), (1, 3)])
def test_the_servers_mean_and_the_learning_rate(r: float, labelled: int, unlabelled: int) -> None:
    draws = np.random.default_rng(1)
    models = [draws.normal(size=4) for _ in range(labelled + unlabelled)]
    of_labelled, of_unlabelled = collaborative_shares(labelled, unlabelled, progressive_weight(r, 10.0))
    shares = [of_labelled] * labelled + [of_unlabelled] * unlabelled
    mean = weighted_average([Weights({"w": torch.from_numpy(model)}) for model in models], shares)
    expected = paper.consensus(models[:labelled], models[labelled:], r)
    np.testing.assert_allclose(mean["w"].numpy(), expected, atol=1e-12)
    assert inverse_power(r, 0.01) == pytest.approx(paper.learning_rate(r), rel=1e-12)
