"""Copies of a network, and readers of its stages."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fedshift
from fedshift.models import registry
from fedshift.models.instance_methods import with_method, without_method
from fedshift.models.network import Network, StageReader, copy_with
from tried import slow_after


def mlp(hidden: list[int]) -> Network:
    return registry.build(registry.parse({"name": "mlp", "hidden": hidden}), (6,), 7, seed=0)


def test_a_copy_is_whole_and_apart() -> None:
    """As torch's own: weights, modes, hooks and what is shared within the network, for modules of any kind."""
    tied = nn.Linear(4, 4)
    recurrent = nn.LSTM(4, 4)
    features = nn.Sequential(tied, nn.BatchNorm1d(4), nn.Sequential(tied, nn.Dropout(0.5)), nn.Identity())
    features[3].odd, features[3].empty = recurrent, None
    features[3].remembered = {"rows": [1, 2]}
    features[3].again = features[3].remembered
    network = Network(features, nn.Linear(4, 3), embedding_size=4, classes=3, stages={"one": "features.0"},
                      alignment_stages=["one"], seed=5)  # fmt: skip
    heard: list[nn.Module] = []
    features[1].register_forward_hook(lambda module, *_: heard.append(module))
    features[0].bias.requires_grad_(False)
    features[1].eval()
    made = copy.deepcopy(network)
    assert type(made) is Network
    assert made.keywords == network.keywords
    assert str(made) == str(network)
    assert [(name, one.training) for name, one in made.named_modules()] == [
        (name, one.training) for name, one in network.named_modules()
    ]
    there, here = dict(made.named_parameters()), dict(network.named_parameters())
    assert list(there) == list(here)
    for name, parameter in there.items():
        assert torch.equal(parameter, here[name])
        assert parameter.requires_grad == here[name].requires_grad
        assert parameter.data_ptr() != here[name].data_ptr()
    copied = made.features
    assert copied[0] is copied[2][0] is not tied
    assert copied[3].again is copied[3].remembered is not features[3].remembered
    assert torch.equal(made.eval()(torch.ones(2, 4)), network.eval()(torch.ones(2, 4)))
    assert heard == [copied[1], features[1]]
    copied[1].register_forward_hook(lambda *_: None)
    assert len(features[1]._forward_hooks) == 1
    assert torch.equal(copied[3].odd(torch.ones(1, 4))[0], recurrent(torch.ones(1, 4))[0])


class Doubled(nn.Linear):
    """Loads twice what a file holds."""

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *rest: object) -> None:
        twice = {name: 2 * value if name.startswith(prefix) else value for name, value in state.items()}
        super()._load_from_state_dict(twice, prefix, *rest)


def networks() -> dict[str, Network]:
    plain, tied, hooked, own, parts = (mlp([5, 4]) for _ in range(5))
    tied.features.add_module("again", nn.Sequential(nn.Linear(4, 4)))
    tied.features.again.add_module("twin", tied.features.again[0])
    hooked.classifier.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: state[f"{prefix}bias"].add_(1))
    own.classifier = Doubled(4, 7)
    parts.features.hidden1[0].weight.requires_grad_(False)
    parts.features.register_buffer("unsaved", torch.ones(2), persistent=False)
    parts.eval()
    images = registry.build(registry.parse({"name": "digit_cnn"}), (1, 28, 28), 3, seed=0)
    return {"plain": plain, "tied": tied, "hooked": hooked, "own": own, "parts": parts, "images": images}


@pytest.mark.parametrize("name", slow_after(2, networks()))
def test_a_copy_with_weights_is_what_torch_loads_into_a_copy(name: str) -> None:
    network = networks()[name]
    weights = {key: torch.rand(value.shape).to(value.dtype) for key, value in network.state_dict().items()}
    before = {key: value.clone() for key, value in network.state_dict().items()}
    expected = copy.deepcopy(network)
    expected.load_state_dict({key: value.clone() for key, value in weights.items()})
    expected.train()
    made = copy_with(network, {key: value.clone() for key, value in weights.items()})
    assert [type(module) for module in made.modules()] == [type(module) for module in expected.modules()]
    assert all(module.training for module in made.modules())
    for found, right in zip((*made.named_parameters(), *made.named_buffers()),
                            (*expected.named_parameters(), *expected.named_buffers()), strict=True):  # fmt: skip
        assert found[0] == right[0]
        assert torch.equal(found[1], right[1])
        assert (found[1].stride(), found[1].requires_grad, type(found[1])) == (
            right[1].stride(), right[1].requires_grad, type(right[1]))  # fmt: skip
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not {value.data_ptr() for value in made.state_dict().values()} & {
        value.data_ptr() for value in network.state_dict().values()
    }


def test_weights_of_another_network_are_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        copy_with(mlp([5, 4]), mlp([5, 3]).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        copy_with(mlp([5, 4]), {})


def test_a_reader_gives_what_single_passes_give_and_leaves_nothing_behind() -> None:
    model = mlp([5, 4])
    model.features.hidden1.register_forward_hook(lambda _module, _inputs, output: output + 1)  # as plug-ins do
    with StageReader(model, ("hidden2", "hidden1")) as read:
        # A hook that comes after the reader's, and before its first pass.
        model.features.hidden2.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        for seed in range(3):
            inputs = torch.rand(2, 6, generator=torch.Generator().manual_seed(seed))
            logits, stages = read(inputs)
            expected, single = model.with_stages(inputs, ("hidden2", "hidden1"))
            assert list(stages) == ["hidden2", "hidden1"]
            torch.testing.assert_close((logits, stages), (expected, single), rtol=0, atol=0)
            torch.testing.assert_close(logits, model.classifier(stages["hidden2"]), rtol=0, atol=0)
    assert len(model.features.hidden1._forward_hooks) == 1
    assert len(model.features.hidden2._forward_hooks) == 1


def test_a_reader_is_closed_after_an_error() -> None:
    model = mlp([5])
    with pytest.raises(RuntimeError), StageReader(model, ("hidden1",)) as read:
        read(torch.rand(2, 7))
    assert not model.features.hidden1._forward_hooks


def test_a_module_s_own_method_goes_with_its_copies_and_away_again() -> None:
    layer = nn.Linear(2, 2)
    with_method(layer, "forward", lambda module, inputs: inputs + module.bias)
    made = copy.deepcopy(layer)
    with torch.no_grad():
        made.bias.fill_(1.0)
    assert torch.equal(made(torch.zeros(1, 2)), torch.ones(1, 2))
    assert torch.equal(layer(torch.zeros(1, 2))[0], layer.bias)
    assert type(made) is nn.Linear
    without_method(made, "forward")
    assert torch.equal(made(torch.zeros(1, 2)), torch.ones(1, 2))  # x Wᵀ + b of x = 0
    assert not torch.equal(made(torch.ones(1, 2)), torch.full((1, 2), 2.0))


@pytest.mark.slow
def test_no_object_is_given_another_class() -> None:
    assigned = [
        path.name
        for path in Path(fedshift.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert assigned == []
