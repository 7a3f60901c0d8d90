"""Linear layers whose products go through oneDNN compute what torch's linear layer computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.models import products
from fedshift.models.instance_methods import has_method, method_of
from fedshift.models.networks.mlp import Mlp
from fedshift.models.products import onednn_linear, with_products

available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
needs_onednn = pytest.mark.skipif(not available, reason="this torch was built without oneDNN")


def pair(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    return plain, with_products(copy.deepcopy(plain), "onednn")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """No product is too small; the shapes of those that were made."""
    made: list[tuple[int, ...]] = []
    forward = products._Product.forward

    def noted(a: Tensor, b: Tensor) -> Tensor:
        made.append((*a.shape, len(b)))
        return forward(a, b)

    monkeypatch.setattr(products, "_LEAST", 0)
    monkeypatch.setattr(products._Product, "forward", staticmethod(noted))
    return made


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (64, 300, 128)])
def test_same_outputs_and_gradients_as_torch(
    shape: tuple[int, int, int], bias: bool, always: list[tuple[int, ...]]
) -> None:
    samples, inputs, outputs = shape
    plain, fast = pair(inputs, outputs, bias)
    x, weighting = torch.randn(samples, inputs), torch.randn(samples, outputs)
    found: list[list[Tensor]] = []
    for layer in (plain, fast):
        x_here = x.clone().requires_grad_()
        out = layer(x_here)
        found.append([out, *torch.autograd.grad((out * weighting).sum(), [x_here, *layer.parameters()])])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert always == [(samples, inputs, outputs), (samples, outputs, inputs), (outputs, samples, inputs)]


@needs_onednn
def test_gradients_of_gradients(always: list[tuple[int, ...]]) -> None:
    plain, fast = pair(6, 4)
    x = torch.randn(5, 6)
    found: list[tuple[Tensor, ...]] = []
    for layer in (plain, fast):
        x_here = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x_here).square().sum(), x_here, create_graph=True)
        found.append(torch.autograd.grad((slope.norm(dim=1) - 1).square().sum(), [x_here, *layer.parameters()]))
    assert len(always) > 3
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_only_what_it_is_faster_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("a product that torch should have made")

    monkeypatch.setattr(products._Product, "forward", staticmethod(never))
    _, fast = pair(30, 20)
    fast(torch.randn(8, 30))  # too small
    monkeypatch.setattr(products, "_LEAST", 0)
    fast(torch.randn(2, 8, 30))  # not a matrix
    fast.double()(torch.randn(8, 30).double())
    with pytest.raises(AssertionError, match="should have made"):
        fast.float()(torch.randn(8, 30))


@needs_onednn
def test_names_weights_and_other_layers_stay() -> None:
    torch.manual_seed(0)
    network = Mlp(hidden=(8, 4), batch_norm=True).build((5,), 3)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    names = [name for name, layer in network.named_modules() if type(layer) is nn.Linear]
    assert with_products(network, "onednn") is network
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    fast = [name for name, layer in network.named_modules() if method_of(layer, "forward") is onednn_linear]
    assert fast == names
    made = copy.deepcopy(network)
    assert method_of(made.classifier, "forward") is onednn_linear
    assert made.classifier.forward.__self__ is made.classifier


@needs_onednn
def test_without_the_private_call_public_ones_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(64, 300), torch.randn(128, 300)
    expected = products._Product.apply(a, b)
    monkeypatch.delattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(type(torch.ops.mkldnn), "__getattr__", lambda *_: (_ for _ in ()).throw(AttributeError()))
    assert torch.equal(products._Product.apply(a, b), expected)


def test_a_torch_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_method(with_products(nn.Linear(2, 2), "default"), "forward")
    with pytest.raises(UserError, match=r"training\.matrix_products: .* write default"):
        with_products(nn.Linear(2, 2), "onednn")
