"""FedDyn: its rounds by hand, what the server and the sites remember, a missing site."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from lost import kept, lose
from tiny import MLP, NORMED, assert_close, domains, federation, run, start_of, step_on

from fedshift.functional.averaging import is_buffer
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddyn import FedDyn
from fedshift.weights import Weights

SIZES = {"large": 41, "small": 5, "other": 16}


def gradient_of(state: State) -> Weights:
    return cast(Weights, state.parts["gradient"])


def test_the_first_round_with_a_weak_penalty_goes_twice_as_far_as_fedavg() -> None:
    """h = −α(mean − θ₀), so θ₁ = mean − h/α = mean + (mean − θ₀). BatchNorm statistics are the mean."""
    found, method = domains(NORMED, SIZES), FedDyn(alpha=1e-6)
    start = start_of(method, found, NORMED)
    mean = run(FedAvg(weighting="uniform"), found, NORMED, rounds=1)[0].weights
    for name, tensor in run(method, found, NORMED, rounds=1)[0].weights.items():
        expected = mean[name] if is_buffer(name) else 2 * mean[name] - start[name]
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)


def test_a_missing_site_counts_as_one_that_did_not_move() -> None:
    found, method = domains(MLP, SIZES), FedDyn(alpha=0.3)
    options: dict[str, Any] = {"rounds": 2}
    where, start = federation(method, found, MLP, **options), start_of(method, found, MLP)
    whole = federation(method, found, MLP, **options)
    models = {site: reply.weights for site, reply in whole.ask(method.fit, to=whole.sources, weights=start).items()}
    lose(where, "other")
    state = step_on(method, where, method.start(where, start))
    for name, tensor in state.weights.items():
        mean = (models["large"][name] + models["small"][name]) / 2
        h = -0.3 / 3 * (models["large"][name] + models["small"][name] - 2 * start[name])
        torch.testing.assert_close(gradient_of(state)[name], h, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(tensor, mean - h / 0.3, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("site", "mean_samples"), [("small", 20.0), ("large", 20.0)])
def test_a_site_s_strength_is_in_the_inverse_of_its_samples(site: str, mean_samples: float) -> None:
    """α_k = α·N̄/N_k, in the loss and in h_k alike."""
    found = domains(MLP, SIZES)
    fits = []
    for method, mean in ((FedDyn(alpha=0.3), mean_samples), (FedDyn(alpha=0.3 * mean_samples / SIZES[site]), 0.0)):
        where, start = federation(method, found, MLP), start_of(method, found, MLP)
        for _ in range(2):
            update = dict(where.ask(method.fit, to=[site], weights=start, mean_samples=mean).items())[site]
        fits.append((update.weights, kept(where, site, "gradient")))
    for weighed, plain in zip(*fits, strict=True):
        assert_close(weighed, plain)
