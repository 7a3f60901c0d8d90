"""The layer that skips zeros computes what torch's linear layer computes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedshift.models.networks.mlp import Mlp
from fedshift.models.wide import WIDE, WideLinear


def plain(layer: WideLinear) -> nn.Linear:
    """torch's layer with the same weights."""
    inputs, outputs = layer.weight.shape
    linear = nn.Linear(inputs, outputs)
    linear.load_state_dict({"weight": layer.weight.detach().t(), "bias": layer.bias.detach()})
    return linear


def bags(samples: int, words: int, share: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(samples, words, generator=generator) < share
    return present * torch.randint(1, 5, (samples, words), generator=generator).float()


@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 5), st.floats(0, 1))
def test_same_outputs_and_gradients_as_torch(samples: int, words: int, outputs: int, share: float) -> None:
    layer = WideLinear(words, outputs)
    linear = plain(layer)
    inputs, weighting = bags(samples, words, share), torch.randn(samples, outputs)
    ours, theirs = layer(inputs), linear(inputs)
    torch.testing.assert_close(ours, theirs)
    (ours * weighting).sum().backward()
    (theirs * weighting).sum().backward()
    assert linear.weight.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, linear.weight.grad.t())
    torch.testing.assert_close(layer.bias.grad, linear.bias.grad)


def test_the_zeros_are_skipped_only_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    to_rows = Tensor.to_sparse_csr

    def counted(tensor: Tensor) -> Tensor:
        seen.append(len(tensor))
        return to_rows(tensor)

    monkeypatch.setattr(Tensor, "to_sparse_csr", counted)
    layer = WideLinear(200, 3)
    layer(bags(10, 200, 0.5))
    layer(bags(10, 200, 0.02).requires_grad_())
    assert not seen
    layer(bags(10, 200, 0.02))
    assert seen == [10] or not torch.backends.mkl.is_available()


def test_gradient_check_also_of_the_gradient() -> None:
    inputs = bags(4, 40, 0.05).double()
    layer = WideLinear(40, 2).double()
    assert 0 < int(inputs.count_nonzero()) < 16
    assert torch.autograd.gradcheck(lambda weight: _applied(layer, weight, inputs), (layer.weight,))
    assert torch.autograd.gradgradcheck(lambda weight: _applied(layer, weight, inputs).square(), (layer.weight,))


def _applied(layer: WideLinear, weight: Tensor, inputs: Tensor) -> Tensor:
    return torch.func.functional_call(layer, {"weight": weight}, (inputs,))


def test_initial_values_are_those_of_torch() -> None:
    torch.manual_seed(3)
    layer = WideLinear(300, 20)
    torch.manual_seed(3)
    linear = nn.Linear(300, 20)
    torch.testing.assert_close(layer.weight.t(), linear.weight)
    assert torch.equal(layer.bias, linear.bias)


def test_mlp_uses_it_from_some_thousand_inputs_on() -> None:
    torch.manual_seed(0)
    wide, narrow = Mlp(hidden=(8,)).build((WIDE,), 2), Mlp(hidden=(8,)).build((WIDE - 1,), 2)
    images = Mlp(hidden=(8,)).build((1, 64, 64), 2)
    kinds = [type(network.get_submodule("features.hidden1.0")) for network in (wide, narrow, images)]
    assert kinds == [WideLinear, nn.Linear, nn.Linear]
    inputs = bags(6, WIDE, 0.02)
    twin = copy.deepcopy(wide)
    assert torch.equal(wide(inputs), twin(inputs))
