"""The inner step and known gradients: numbers by hand, and autograd through two steps as the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedshift.functional.meta_learning import answer_at, inner_step, with_gradient
from fedshift.methods.pooled.feature_critic import utility
from fedshift.methods.pooled.masf import clipped_by_norm
from fedshift.methods.pooled.metareg import weighted_l1


def train(w: Tensor) -> Tensor:
    return (w**2).sum()


def test_first_and_second_order_by_hand() -> None:
    """L(w) = Σ(w − 1)² at θ̂ = θ − β·2θ: first order 2(θ̂ − 1), second order (1 − 2β)·2(θ̂ − 1)."""
    theta = torch.tensor([2.0, -3.0], dtype=torch.float64, requires_grad=True)
    for second, factor in ((False, 1.0), (True, 1 - 2 * 0.1)):
        (gradient,) = torch.autograd.grad(train(theta), [theta], create_graph=second)
        ahead = inner_step({"w": theta}, [gradient], 0.1, second_order=second)["w"]
        torch.testing.assert_close(ahead, torch.tensor([1.6, -2.4]).double())
        (found,) = torch.autograd.grad((ahead - 1).square().sum(), [theta])
        torch.testing.assert_close(found, factor * 2 * (ahead.detach() - 1))


def test_clipping_is_element_wise() -> None:
    theta = torch.zeros(3)
    ahead = inner_step({"w": theta}, [torch.tensor([-250.0, 40.0, 101.0])], 1.0, 100)["w"]
    assert ahead.tolist() == [100.0, -40.0, -100.0]
    assert inner_step({"w": theta}, [torch.tensor([-250.0, 40.0, 101.0])], 1.0)["w"].tolist() == [250, -40, -101]


def test_a_known_gradient_is_handed_on() -> None:
    theta = torch.tensor([2.0, -3.0], requires_grad=True)
    other = torch.tensor(5.0, requires_grad=True)
    value = with_gradient(torch.tensor(7.0), [theta, other], [torch.tensor([1.0, 4.0]), torch.tensor(2.0)])
    assert value.item() == 7
    (3 * value + (theta * 2).sum()).backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx([5, 14])
    assert other.grad is not None
    assert other.grad.item() == pytest.approx(6)


def test_each_tensor_is_scaled_to_its_norm() -> None:
    clipped = clipped_by_norm([torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4]), torch.zeros(2)], largest=1.0)
    assert [tensor.tolist() for tensor in clipped] == [pytest.approx([0.6, 0.8]), pytest.approx([0.3, 0.4]), [0.0, 0.0]]


def test_the_weighted_l1_penalty_of_metareg() -> None:
    assert weighted_l1([torch.tensor([1.0, -2.0])], [torch.tensor([0.5, 0.25])]).item() == pytest.approx(1.0)


def test_a_step_that_changed_nothing_is_of_no_use() -> None:
    assert utility(torch.tensor(0.7), torch.tensor(0.7)).item() == 0
    assert utility(torch.tensor(1.0), torch.tensor(0.5)).item() == pytest.approx(0.4621172, abs=1e-6)


def test_an_answer_at_other_parameters_is_that_of_a_module_that_has_them_and_moves_no_statistics() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    other = {name: torch.randn_like(value).requires_grad_() for name, value in layers.named_parameters()}
    twin = copy.deepcopy(layers)
    twin.load_state_dict({**twin.state_dict(), **{name: value.detach() for name, value in other.items()}})
    inputs, before = torch.randn(5, 3), copy.deepcopy(layers.state_dict())
    found = answer_at(layers, other, inputs)
    torch.testing.assert_close(found, twin(inputs))
    for name, value in layers.state_dict().items():
        assert torch.equal(value, before[name])
    torch.autograd.grad(found.sum(), list(other.values()))  # every parameter takes part
    answer_at(layers, other, inputs, counts=True)
    for name, value in layers.state_dict().items():
        expected = twin.state_dict()[name] if "running" in name or "tracked" in name else before[name]
        torch.testing.assert_close(value, expected)
    # by the definition: a tenth of what the layer before gives at the other parameters
    middle = inputs @ other["0.weight"].T + other["0.bias"]
    torch.testing.assert_close(layers.state_dict()["1.running_mean"], 0.1 * middle.mean(0).detach())


def test_an_answer_of_a_part_takes_the_parameters_below_it() -> None:
    whole = nn.ModuleDict({"features": nn.Linear(2, 2), "classifier": nn.Linear(2, 1)})
    other = {"features.weight": torch.eye(2) * 3, "classifier.weight": torch.zeros(1, 2)}
    found = answer_at(whole, other, torch.tensor([[1.0, 2.0]]), part="features")
    torch.testing.assert_close(found, torch.tensor([[3.0, 6.0]]) + whole["features"].bias)
