"""SCAFFOLD's, FedNova's and FedDyn's equations: worked numbers, real optimisers as a reference, fixed points."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.control_variates import linear_term, moved_gradient, normalising_factor
from fedshift.methods.federated.fednova import normalised_average
from fedshift.methods.federated.scaffold import next_control

NUMBER = st.floats(-10, 10)
MOMENTUM = st.floats(0, 0.95)


def of(*values: float) -> dict[str, Tensor]:
    """A model of one tensor."""
    return {"w": torch.tensor(values, dtype=torch.float64)}


@given(NUMBER, NUMBER, st.lists(NUMBER, min_size=1, max_size=6), st.floats(1e-3, 1))
def test_a_control_variate_is_the_mean_gradient_on_the_way(
    own: float, common: float, gradients: list[float], rate: float
) -> None:
    """Steps down g − c_i + c: what they moved, divided by T·η, gives c_i − c + … = the mean of g."""
    position = start = 0.7
    for gradient in gradients:
        position -= rate * (gradient - own + common)
    new = next_control(of(own), of(common), of(start), of(position), path=len(gradients) * rate)
    assert new["w"].item() == pytest.approx(sum(gradients) / len(gradients), abs=1e-6)


def test_the_linear_term_adds_its_direction_to_the_gradient() -> None:
    weights = {"w": torch.tensor([1.0, 2.0], requires_grad=True), "b": torch.tensor([3.0], requires_grad=True)}
    term = linear_term(weights, {"b": torch.tensor([5.0]), "w": torch.tensor([-1.0, 4.0])})
    assert term.item() == -1 + 8 + 15
    gradients = torch.autograd.grad(term, list(weights.values()))
    assert [gradient.tolist() for gradient in gradients] == [[-1.0, 4.0], [5.0]]


@given(st.integers(0, 30), MOMENTUM, st.floats(1e-3, 0.9))
def test_factors_are_the_paper_s_closed_forms(steps: int, rho: float, alpha: float) -> None:
    with_momentum = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert normalising_factor(steps, rho) == pytest.approx(with_momentum, rel=1e-9, abs=1e-9)
    assert normalising_factor(steps, decay=alpha) == pytest.approx((1 - (1 - alpha) ** steps) / alpha, rel=1e-9)
    assert normalising_factor(steps, rho, lasting=True) == pytest.approx(steps / (1 - rho), rel=1e-9)


@given(st.integers(1, 12), st.floats(0.1, 0.95), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_factors_are_how_far_torch_s_sgd_moves(steps: int, rho: float, nesterov: bool, mu: float) -> None:
    """The loss has gradient 1 everywhere, and a proximal term from 0."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=rho, nesterov=nesterov)
    for _ in range(steps):
        optimizer.zero_grad()
        (weight.sum() + mu / 2 * weight.square().sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert -weight.item() / 0.5 == pytest.approx(normalising_factor(steps, rho, 0.5 * mu, nesterov=nesterov))


@given(st.lists(st.tuples(NUMBER, st.floats(0.1, 1)), min_size=1, max_size=5), NUMBER, st.floats(0.5, 20))
def test_equal_factors_give_the_mean(models: list[tuple[float, float]], start: float, factor: float) -> None:
    total = sum(share for _, share in models)
    shares = [share / total for _, share in models]
    found = normalised_average(of(start), [of(value) for value, _ in models], shares, [factor] * len(models))
    mean = sum(share * value for share, (value, _) in zip(shares, models, strict=True))
    assert found["w"].item() == pytest.approx(mean, abs=1e-9)


def test_a_site_without_steps_counts_as_not_moved() -> None:
    found = normalised_average(of(1.0), [of(3.0), of(1.0)], [0.5, 0.5], [2.0, 0.0])
    assert found["w"].item() == 1 + (0.5 * 2) * (0.5 * 1)


@given(NUMBER, NUMBER, NUMBER, st.floats(0.01, 2))
def test_h_is_the_gradient_at_the_site_s_optimum(h: float, sent: float, centre: float, alpha: float) -> None:
    """L = ½(θ − m)²: where L plus the penalty is least, the moved h is L's gradient, θ − m."""
    optimum = (centre + h + alpha * sent) / (1 + alpha)
    moved = moved_gradient(of(h), of(sent), of(optimum), alpha)
    assert moved["w"].item() == pytest.approx(optimum - centre, abs=1e-6)
