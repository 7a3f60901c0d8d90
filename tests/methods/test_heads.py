"""What methods add to a network: its weights follow from the network's seed, never from other weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from every_method import every_method_in_time
from tiny import NORMED, federation, network_for, normed_for, start_of, vectors
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.heads import Dropout, redrawn, with_block, with_experts, with_own_statistics
from fedshift.models import registry as models
from fedshift.models.network import Network


def network(seed: int = 3) -> Network:
    return models.build(models.parse(NORMED), (5,), 3, seed)


def moved(plain: Network) -> Network:
    """A copy in which every weight is one unit in the last place larger, as another processor may draw it."""
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    return other


def added(method: Method, plain: Network) -> dict[str, Tensor]:
    """What the method's network holds that ``plain`` did not: tensors with the values of none of its own."""
    known = list(plain.state_dict().values())
    made = method.adapt_network(plain, 3).state_dict()
    return {name: tensor for name, tensor in made.items() if not any(torch.equal(tensor, old) for old in known)}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_method_in_time
def test_new_weights_do_not_depend_on_the_bits_of_others(name: str) -> None:
    method = registry.parse({"name": name, **registry.method_class(name).traits.tests.golden})
    kind = normed_for(method)
    shape = (5,) if kind == NORMED else (1, 28, 28)
    plain = models.build(network_for(method, kind, shape), shape, 3, 3)
    assert_equal(added(method, plain), added(method, moved(plain)))


ADDING = ("fedsr", "fedl2r", "fedcmi", "copa", "shot", "fada", "mdfnet", "m3sda", "dael", "fedadg")


@pytest.mark.parametrize("name", ADDING)
def test_new_weights_differ_between_seeds(name: str) -> None:
    method = registry.parse({"name": name, **registry.method_class(name).traits.tests.golden})
    first, second = added(method, network(3)), added(method, network(4))
    drawn = [key for key, tensor in first.items() if len(tensor.unique()) > 1]
    assert drawn, "nothing new is drawn"
    assert not any(torch.equal(first[key], second[key]) for key in drawn)


def test_copies_and_networks_made_of_others_keep_the_seed() -> None:
    block = with_block(network(7), lambda width: nn.Linear(width, 4), size=4, classifier=nn.Linear)
    assert [made.seed for made in (network(7), copy.deepcopy(network(7)), block, with_experts(block, 2))] == [7] * 4


def test_blocks_of_other_names_and_experts_are_drawn_apart() -> None:
    plain = network()
    blocks = [
        with_block(plain, lambda width: nn.Linear(width, width), size=plain.embedding_size, names=("old", name))
        for name in ("one", "two")
    ]
    first, second = (
        made.get_submodule(f"features.{name}").weight for made, name in zip(blocks, ("one", "two"), strict=True)
    )
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.equal(first, second)
    heads = with_experts(plain, 3).classifier.heads
    assert isinstance(heads, nn.ModuleList)
    assert heads[0] is plain.classifier
    weights = [next(head.parameters()) for head in heads]
    assert not any(torch.equal(weights[one], weights[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_a_seed_redraws_without_moving_the_callers_generator() -> None:
    layer = nn.Linear(3, 2)
    before = torch.get_rng_state()
    first, again, other = (redrawn(layer, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert not torch.equal(redrawn(layer).weight, layer.weight)
    assert not torch.equal(torch.get_rng_state(), before), "without a seed torch's generator draws"


def test_a_site_s_statistics_are_those_of_all_its_samples_although_they_are_sorted_by_class() -> None:
    found = vectors("a", 1200)
    order = np.argsort(found.labels, kind="stable")
    found = Domain("a", found.inputs[order], found.labels[order])
    where = federation(FedAvg(), [found], NORMED)
    assert isinstance(where, LocalFederation)
    site = where._runners["a"].site
    made = with_own_statistics(site, start_of(FedAvg(), [found], NORMED))
    first = next(module for module in made.modules() if isinstance(module, nn.BatchNorm1d))
    seen: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        made(torch.from_numpy(found.inputs))
    variance, mean = torch.var_mean(torch.cat(seen), 0)
    torch.testing.assert_close(first.running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.running_var, variance, rtol=0.02, atol=0.0)
    assert not made.training


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1.0])
def test_dropout_gives_what_torch_gives(rate: float) -> None:
    plain, fast = nn.Dropout(rate), Dropout(rate)
    inputs = torch.randn(7, 33, requires_grad=True)
    found = []
    for layer in (plain, fast):
        torch.manual_seed(1)
        said = layer(inputs)
        (slope,) = torch.autograd.grad(said.square().sum(), inputs)
        found.append((said, slope, torch.rand(3)))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(fast.eval()(inputs), inputs)
