"""BatchNorm at a new site: statistics by hand, mixed with the trained ones; and what is left as it was."""

from __future__ import annotations

import pytest
import torch
from tiny import NORMED, evaluated, start_of
from torch import nn

from fedshift.functional.batchnorm import mixed_statistics
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.normalisation import adapted_to, batch_norms


def network_of(norm: nn.Module) -> Network:
    return Network(norm, nn.Identity(), embedding_size=2, classes=2, stages={}, alignment_stages=())


def test_statistics_of_unequal_batches() -> None:
    """Means 0 of six and 3 of three samples: 1 over all nine. A batch of one is left out."""
    norm = nn.BatchNorm1d(2)
    first, second = torch.tensor([[-1.0, 2.0], [1.0, -2.0]]).repeat(3, 1), torch.full((3, 2), 3.0)
    batches = [first, second, torch.full((1, 2), 1e6)]
    found = adapted_to(network_of(norm), batches, prior=0).features
    assert isinstance(found, nn.BatchNorm1d)
    torch.testing.assert_close(found.running_mean, torch.tensor([1.0, 1.0]))
    variance = first.var(0) * 6 / 9  # the second batch has none
    torch.testing.assert_close(found.running_var, variance)
    half = adapted_to(network_of(norm), batches, prior=9).features
    torch.testing.assert_close(half.running_mean, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(half.running_var, (1 + variance) / 2)
    assert not found.training
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0, 0]


def test_without_samples_the_trained_ones_stay() -> None:
    trained, found = (torch.zeros(2), torch.ones(2)), (torch.full((2,), 5.0), torch.full((2,), 7.0))
    assert all(map(torch.equal, mixed_statistics(trained, found, samples=0, prior=0), trained))


def test_a_shifted_site_is_brought_back() -> None:
    """What a network answers on samples that are moved and stretched is what it answered before."""
    method = FedAvg()
    network = evaluated(method, start_of(method, network=NORMED), network=NORMED)
    first = next(module for module in network.modules() if isinstance(module, nn.Linear))
    inputs = torch.randn(64, first.in_features, generator=torch.Generator().manual_seed(0))
    here, there = (adapted_to(network, [batch], prior=0)(batch) for batch in (inputs, 3 * inputs + 1))
    torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)
    plain = network(inputs), network(3 * inputs + 1)
    assert (plain[0] - plain[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("model", "layers"), [({"batch_norm": "stored"}, 0), ({"trained_from": "block4"}, 5), ({}, 20)]
)
def test_layers_that_keep_what_they_loaded(model: dict[str, object], layers: int) -> None:
    with torch.device("meta"):
        network = models.build(models.parse({"name": "resnet18", **model}), (3, 32, 32), 2, 0)
    assert len(batch_norms(network)) == layers
