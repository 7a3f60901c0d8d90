"""BatchNorm and the classifier at a new site: by hand, mixed with what was trained; and what is left as it was."""

from __future__ import annotations

import pytest
import torch
from tiny import NORMED, evaluated, start_of
from torch import nn

from fedshift.methods.composition.new_site import NewSite, turned_templates
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.normalisation import adapted_to, batch_norms, mixed_statistics


def network_of(norm: nn.Module, classifier: nn.Module | None = None) -> Network:
    head = classifier or nn.Identity()
    return Network(norm, head, embedding_size=2, classes=2, stages={}, alignment_stages=())


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


def test_templates_by_hand() -> None:
    """Two classes, N = 1, three samples: s = 3/5. Of the two samples of class 0 the surer one counts, (3, 4)/5."""
    logits = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
    features = torch.tensor([[3.0, 4.0], [7.0, 0.0], [0.0, 2.0]])
    found = turned_templates(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), logits, features, prior=1)
    first = torch.tensor([0.4 + 0.6 * 0.6, 0.6 * 0.8])
    torch.testing.assert_close(found, 3 * torch.stack([first / first.norm(), torch.tensor([0.0, 1.0])]))


def test_a_class_that_is_never_predicted_keeps_its_direction_and_none_turns_without_samples() -> None:
    rows, logits, features = torch.eye(2), torch.tensor([[9.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert turned_templates(rows, logits, features, prior=0)[1].tolist() == [0, 1]
    assert turned_templates(rows, logits[:0], features[:0], prior=0).tolist() == rows.tolist()


def test_the_same_share_for_frequent_and_rare_classes() -> None:
    """Features of all classes have a direction in common. A class that turned further towards it would win all."""
    common, own = torch.tensor([5.0, 0.0, 0.0]), torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    features = common + own[[0] * 99 + [1]]
    found = turned_templates(own, features @ own.T, features, prior=16)
    torch.testing.assert_close(found[0, 0], found[1, 0])
    assert (features @ found.T).argmax(1).tolist() == [0] * 99 + [1]


def test_the_classifier_turns_over_batches_and_the_trained_network_stays() -> None:
    linear = nn.Linear(2, 2)
    network, inputs = network_of(nn.Identity(), linear).eval(), torch.randn(9, 2)
    whole, parts = (NewSite(classifier=2).adapt(network, lambda b=b: b) for b in ([inputs], inputs.split(4)))
    with torch.no_grad():
        expected = inputs @ turned_templates(linear.weight, network(inputs), inputs, 2).T
        torch.testing.assert_close(whole(inputs), expected)
        torch.testing.assert_close(parts(inputs), expected)
        assert not torch.equal(network(inputs), expected)
    assert NewSite().adapt(network, lambda: [inputs]) is network


def test_a_classifier_of_several_layers_stays() -> None:
    network = network_of(nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())).eval()
    inputs = torch.randn(9, 2)
    assert torch.equal(NewSite(classifier=2).adapt(network, lambda: [inputs])(inputs), network(inputs))


def test_the_classifier_turns_by_a_network_that_predicts() -> None:
    """By running statistics, whatever mode the network came in; and what comes of it predicts, too."""
    network = models.build(models.parse(NORMED), (5,), 3, 0)
    inputs = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    adapted = [NewSite(classifier=16).adapt(network.train(mode), lambda: [inputs]) for mode in (True, False)]
    assert not any(module.training for made in adapted for module in made.modules())
    assert torch.equal(adapted[0].classifier.weight, adapted[1].classifier.weight)
