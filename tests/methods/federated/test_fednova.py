"""FedNova: FedAvg where all sites make equally many steps, a round by hand where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lost import lose
from tiny import MLP, NORMED, assert_close, domains, federation, run, start_of, step_on

from fedshift.errors import UserError
from fedshift.functional.averaging import is_buffer
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fednova import FedNova

SIZES = {"large": 41, "small": 5, "other": 16}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(momentum: float) -> None:
    options: dict[str, Any] = {"network": MLP, "momentum": momentum}
    normalised = run(FedNova(steps_per_round=3), **options)[0]
    assert_close(normalised.weights, run(FedAvg(steps_per_round=3), **options)[0].weights)
    assert run(FedNova(), **options)[0].weights != run(FedAvg(), **options)[0].weights


def test_a_round_by_hand() -> None:
    """Mini-batches 5, 1 and 2 of 62 samples; τ_eff = (41·5 + 5·1 + 16·2)/62 without momentum."""
    found, method = domains(NORMED, SIZES), FedNova()
    options: dict[str, Any] = {"rounds": 1, "momentum": 0.0}
    state, _ = run(method, found, NORMED, **options)
    start, where = start_of(method, found, NORMED), federation(method, found, NORMED, **options)
    models = {site: reply.weights for site, reply in where.ask(method.fit, to=where.sources, weights=start).items()}
    factors, effective = {"large": 5, "small": 1, "other": 2}, (41 * 5 + 5 * 1 + 16 * 2) / 62
    assert state.report["factors"] == factors
    for name, tensor in state.weights.items():
        if not tensor.is_floating_point():
            continue
        if is_buffer(name):
            expected = sum(SIZES[site] / 62 * model[name] for site, model in models.items())
        else:
            drift = sum(SIZES[s] / 62 * (start[name] - model[name]) / factors[s] for s, model in models.items())
            expected = start[name] - effective * drift
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"momentum": 0.5}, 1 + 1.5),
        ({"momentum": 0.5, "nesterov": True}, 1.5 + 1.75),
        ({"momentum": 0.5, "reset_optimizer_each_round": False}, 4.0),
        ({"momentum": 0.0, "lr": 0.25}, 1 + 0.5),
    ],
)
def test_factors_of_two_steps(options: dict[str, Any], factor: float) -> None:
    method = FedNova(steps_per_round=2, proximal_weight=2.0 if options["momentum"] == 0 else 0.0)
    state, _ = run(method, domains(MLP), MLP, rounds=1, **options)
    assert state.report["factors"] == pytest.approx(dict.fromkeys(state.report["losses"], factor))


def test_a_missing_site_counts_for_nothing() -> None:
    method = FedNova()
    where = federation(method, domains(MLP, SIZES), MLP)
    lose(where, "small", "other")
    state = step_on(method, where, method.start(where, start_of(method, domains(MLP, SIZES), MLP)))
    alone, _ = run(FedAvg(), [domains(MLP, SIZES)[0]], MLP, rounds=1)
    assert_close(state.weights, alone.weights)


def test_adam_is_refused() -> None:
    with pytest.raises(UserError, match=r"fednova needs training\.optimizer: sgd"):
        run(FedNova(), rounds=1, optimizer="adam")
