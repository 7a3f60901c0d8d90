"""Named tensors: what they share, how they are selected, compared and checked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import TrainingDiverged, UserError
from fedshift.weights import Weights


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))
    model.train()(torch.randn(5, 3, 3, 3))
    return model


def test_tensors_are_shared_detached_and_cannot_be_replaced() -> None:
    model = network()
    parameters = sum(p.numel() for p in model.parameters())
    assert Weights(model.state_dict()).nbytes == 4 * (parameters + 16) + 8 * 1
    model = network()
    weights = Weights(dict(model.named_parameters()))
    assert weights["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert not weights["0.weight"].requires_grad
    with pytest.raises(TypeError):
        weights["0.weight"] = torch.zeros(1)  # type: ignore[index]
    copied = weights.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not copied.equal(weights)
    with pytest.raises(UserError, match="step"):
        Weights({"step": 3})  # type: ignore[dict-item]


def test_prefixes_end_at_a_dot() -> None:
    weights = Weights({name: torch.zeros(1) for name in ("head", "head.bias", "head2.bias", "body.head.bias")})
    assert list(weights.select("head")) == ["head", "head.bias"]
    assert list(weights.select(["head.", "body"])) == ["head", "head.bias", "body.head.bias"]
    assert list(weights.without("head")) == ["head2.bias", "body.head.bias"]
    assert list(weights.select(lambda name: name.endswith("2.bias"))) == ["head2.bias"]
    assert isinstance(weights.select("head"), Weights)
    weights = Weights(network().state_dict())
    shared, private = weights.without("1"), weights.select("1")
    assert shared.merge(private).equal(weights)
    assert shared.merge({"3.bias": torch.ones(4)})["3.bias"].sum() == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": torch.zeros(2)}, "site 'x'.*'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"site 'x'.*'b'.*\(4,\).*\(3,\)"),
        ({"a": torch.zeros(2), "b": torch.zeros(3).double()}, "site 'x'.*'b'.*float64"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "site 'x'.*'c'"),
    ],
)
def test_what_does_not_match_is_named(changed: dict[str, Tensor], message: str) -> None:
    reference = Weights({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(UserError, match=message):
        Weights(changed).check_like(reference, "site 'x'")
    reference.check_like(reference, "site 'x'")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found(bad: float) -> None:
    tensor = torch.zeros(1000)
    good = Weights({"steps": torch.tensor(3), "empty": torch.zeros(0), "w": tensor.clone()})
    good.check_finite("site 'x'")
    tensor[517] = bad
    with pytest.raises(TrainingDiverged, match=r"site 'x'.*'w'"):
        good.merge({"w": tensor}).check_finite("site 'x'")


def test_equality_is_of_bits() -> None:
    zero = Weights({"a": torch.tensor([0.0])})
    assert not zero.equal({"a": torch.tensor([-0.0])})
    assert not zero.equal({"a": torch.tensor([0.0]).double()})
    assert not zero.equal({"a": torch.tensor(0.0)})
    assert not zero.equal({"b": torch.tensor([0.0])})
    nan = Weights({"a": torch.tensor([float("nan")]), "n": torch.tensor(True)})
    assert nan.equal(nan.clone())
    assert nan == nan.clone()
    assert copy.deepcopy(nan) == nan
    transposed = torch.arange(6.0).view(2, 3)
    assert Weights({"a": transposed.T}).equal({"a": transposed.T.contiguous()})
