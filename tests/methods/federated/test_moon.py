"""MOON: FedAvg on its network without the contrast, the loss by hand, whose features it looks at."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from lost import kept, site_of
from tiny import CNN, MLP, NORMED, assert_close, domains, federation, run, setting, start_of, step_on
from torch import nn

from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.moon import Moon
from fedshift.models.network import Network


class WithHead(FedAvg):
    """FedAvg on MOON's network."""

    def adapt_network(self, network: Network, sources: int) -> Network:
        return Moon().adapt_network(network, sources)


def test_without_the_contrast_it_is_fedavg_bit_for_bit() -> None:
    plain, moon = run(WithHead())[0], run(Moon(contrastive_weight=0))[0]
    assert moon.weights == plain.weights
    assert moon.report == plain.report


def test_in_the_first_round_the_contrast_is_a_constant() -> None:
    plain, moon = (run(Moon(contrastive_weight=weight), network=NORMED, rounds=1)[0] for weight in (0.0, 2.0))
    for site, loss in plain.report["losses"].items():
        assert moon.report["losses"][site] - loss > 0
    step = [run(Moon(contrastive_weight=w, steps_per_round=1), rounds=1)[0] for w in (0.0, 2.0)]
    assert_close(step[0].weights, step[1].weights)
    for site, loss in step[0].report["losses"].items():
        assert step[1].report["losses"][site] == pytest.approx(loss + 2 * math.log(2), abs=1e-5)


@pytest.mark.parametrize("network", [CNN, NORMED], ids=["images", "normed"])
def test_the_loss_by_hand(network: dict[str, object]) -> None:
    """Against the common model that came and the model that this site itself trained in the round before."""
    method, found = Moon(contrastive_weight=0.7, temperature=0.3), domains(network)
    state, where = run(method, found, network, rounds=1)
    site = site_of(where, "large")
    last, model = kept(where, "large", "previous"), site.model(start_of(method, found, network))
    batch = next(site.all_batches())
    common, previous = (site.model(one).eval().features(batch.inputs) for one in (state.weights, last))
    features = model.features(batch.inputs)
    near, far = (torch.exp(F.cosine_similarity(features, other) / 0.3) for other in (common, previous))
    contrast = -(near / (near + far)).log().mean()
    expected = F.cross_entropy(model.classifier(features), batch.targets) + 0.7 * contrast
    found_loss = method.loss_at(site, model, state.weights)(batch)
    torch.testing.assert_close(found_loss, expected)
    found_loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_site_remembers_what_it_sent() -> None:
    method = Moon()
    where = federation(method)
    replies = where.ask(method.fit, to=where.sources, weights=start_of(method))
    assert all(kept(where, site, "previous") == reply.weights for site, reply in replies.items())


def test_the_head_is_as_the_paper_has_it() -> None:
    """Two layers, as wide as the features and 256; the classifier reads what they make."""
    method, found = Moon(), domains(CNN)
    where = federation(method, found)
    network = site_of(where, "large").network
    assert network.embedding_size == 256
    batch = next(site_of(where, "large").all_batches())
    assert network.features(batch.inputs).shape == (41, 256)
    state = step_on(method, where, method.start(where, start_of(method, found)))
    assert state.weights["features.block.0.weight"].shape[0] == state.weights["features.block.0.weight"].shape[1]


def test_the_projection_head_bends() -> None:
    """Two layers with a ReLU between them: an odd function plus a constant would be linear."""
    made = setting(Moon(projection=4), domains(MLP), MLP).build_network()
    head = cast(nn.Sequential, made.features)[1]
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert (head(inputs) + head(-inputs) - 2 * head(torch.zeros(1, 6))).abs().max() > 1e-2
