"""FedProx: its gradient in numbers, FedAvg at μ = 0, and a pull that grows with μ."""

from __future__ import annotations

import pytest
import torch
from tiny import NORMED, images, run, start_of

from fedshift.functional.averaging import parameters_of
from fedshift.functional.losses import proximal_penalty
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx


def test_worked_gradient() -> None:
    """g = 0.3, w = 2, w_global = 1.5, μ = 0.01: penalty 0.01/2 · 0.25 = 0.00125, gradient 0.3 + 0.01 · 0.5 = 0.305."""
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    penalty = proximal_penalty([("w", w)], {"w": torch.tensor(1.5, dtype=torch.float64)}, FedProx().proximal_weight)
    assert penalty.item() == pytest.approx(0.00125)
    (0.3 * w + penalty).backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    assert w.grad.item() == pytest.approx(0.305)


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    options = {"local_epochs": 2, "weighting": "uniform"}
    plain, proximal = run(FedAvg(**options))[0], run(FedProx(**options, proximal_weight=0))[0]  # type: ignore[arg-type]
    assert proximal.weights == plain.weights
    assert proximal.report == plain.report


def test_the_first_step_is_fedavgs() -> None:
    """At w = w_global the penalty and its gradient are zero."""
    first = run(FedProx(steps_per_round=1, proximal_weight=5), rounds=1)[0].weights
    assert first == run(FedAvg(steps_per_round=1), rounds=1)[0].weights
    assert run(FedProx(steps_per_round=2), rounds=1)[0].weights != run(FedAvg(steps_per_round=2), rounds=1)[0].weights


def test_two_steps_by_hand() -> None:
    """Without momentum w₂ = w₁ − η (g(w₁) + μ (w₁ − w₀)): FedAvg's second step, and η·μ·(w₁ − w₀) back to w₀."""
    options = {"found": [images("alone", 8)], "rounds": 1, "momentum": 0.0, "lr": 0.05, "batch_size": 8}
    start = start_of(FedAvg(), options["found"])  # type: ignore[arg-type]
    one = run(FedAvg(steps_per_round=1), **options)[0].weights  # type: ignore[arg-type]
    two = run(FedAvg(steps_per_round=2), **options)[0].weights  # type: ignore[arg-type]
    pulled = run(FedProx(steps_per_round=2, proximal_weight=3), **options)[0].weights  # type: ignore[arg-type]
    for name, tensor in pulled.items():
        torch.testing.assert_close(tensor, two[name] - 0.05 * 3 * (one[name] - start[name]), atol=1e-6, rtol=1e-5)


def test_the_pull_grows_with_its_weight_and_leaves_buffers_alone() -> None:
    moved = []
    for weight in (0.0, 0.1, 1.0, 5.0):
        method = FedProx(local_epochs=5, proximal_weight=weight)
        start = start_of(method, network=NORMED)
        state, _ = run(method, network=NORMED, rounds=1)
        parameters = parameters_of(start)
        moved.append(sum((state.weights[name] - value).square().sum().item() for name, value in parameters.items()))
        for name in start:
            if "running" in name:
                assert not torch.equal(state.weights[name], start[name])
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.7 * moved[0]
