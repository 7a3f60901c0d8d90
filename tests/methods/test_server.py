"""Server optimisers beside every method that averages: their step, what it leaves alone, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_method import method_of, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny import NORMED, assert_close, domains, federation, normed_for, run, start_of, step_on

from fedshift.functional.averaging import is_buffer, parameters_of
from fedshift.methods import registry
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.server import Adaptive, Momentum, after_round
from fedshift.weights import Weights

PLAIN = {"optimizer": "momentum", "beta": 0, "rate": 1}
SERVED = [name for name in registry.names() if registry.method_class(name)().traits.averages]


def model(weight: float, mean: float = 0.0, counter: int = 0) -> Weights:
    return Weights(
        {
            "w": torch.tensor([weight]),
            "bn.running_mean": torch.tensor([mean]),
            "bn.num_batches_tracked": torch.tensor(counter),
        }
    )


def double(weight: float) -> Weights:
    return Weights({"w": torch.tensor(weight, dtype=torch.float64)})


def test_two_steps_by_hand() -> None:
    """β = 0.5, η = 2: Δ = 1, m = 1, θ = 0 + 2; then Δ = 3, m = 3.5, θ = 2 + 7. Statistics are the method's."""
    first, kept = after_round(Momentum(beta=0.5, rate=2.0), model(0.0), model(1.0, 4.0, 5), {})
    assert first == model(2.0, 4.0, 5)
    second, kept = after_round(Momentum(beta=0.5, rate=2.0), first, model(5.0, 6.0, 7), kept)
    assert second == model(9.0, 6.0, 7)
    assert dict(kept) == {"first": Weights({"w": torch.tensor([3.5])})}


@pytest.mark.parametrize(
    ("rule", "second"), [("adagrad", 0.25 + 4), ("adam", 0.99 * 0.25 + 0.04), ("yogi", 0.25 + 0.04)]
)
def test_the_second_moment_begins_at_tau_squared(rule: Any, second: float) -> None:
    """τ = 0.5, Δ = 2, m = 0.2, or 2 where β₁ is 0 (adagrad, as in the paper), θ = 1 + 0.1 · m/(√v + 0.5)."""
    first = 2.0 if rule == "adagrad" else 0.2
    moved, kept = after_round(Adaptive(optimizer=rule, tau=0.5, rate=0.1), model(1.0), model(3.0), {})
    assert kept["second"]["w"].item() == pytest.approx(second)
    assert moved["w"].item() == pytest.approx(1 + 0.1 * first / (second**0.5 + 0.5))


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.floats(0.01, 0.95), st.floats(0.05, 1.5), st.floats(0.1, 0.9)
)
def test_with_nesterov_s_momentum_sites_begin_where_torch_s_sgd_is(
    targets: list[float], beta: float, rate: float, work: float
) -> None:
    """A round's sites go a share ``work`` of the way to a target, which is a gradient where they began."""
    theirs = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=rate, momentum=beta, nesterov=True)
    server, state, kept = Momentum(beta=beta, rate=rate, nesterov=True), double(0.0), {}
    for target in targets:
        begun = server.start(state, kept)
        assert begun["w"].item() == pytest.approx(theirs.item(), abs=1e-9)
        after = Weights({"w": begun["w"] + work * (target - begun["w"])})
        theirs.grad = -work * (target - theirs.detach())
        optimizer.step()
        state, kept = after_round(server, state, after, kept)
        if rate == 1:
            assert state["w"].item() == pytest.approx(after["w"].item(), abs=1e-12)
    ahead = rate * beta * kept["first"]["w"].item()
    assert state["w"].item() == pytest.approx(theirs.item() - ahead, abs=1e-9)


def test_what_is_personal_does_not_move() -> None:
    moved, kept = after_round(Momentum(rate=5.0), model(1.0), model(3.0), {}, personal=("w",))
    assert moved == model(3.0)
    assert not kept["first"]


@pytest.mark.parametrize("name", mostly_slow(SERVED))
def test_without_momentum_and_at_rate_one_nothing_changes(name: str) -> None:
    network = normed_for(method_of(name))
    plain, stepped = (run(method_of(name, server=server), network=network, rounds=1)[0] for server in (None, PLAIN))
    for key, tensor in plain.weights.items():
        torch.testing.assert_close(stepped.weights[key], tensor, atol=1e-5, rtol=1e-5)
    assert set(stepped.server) == {"first"}
    assert not plain.server


@pytest.mark.parametrize("server", ["momentum", "adagrad", "adam", "yogi"])
def test_rounds_of_fedavg_by_hand(server: str) -> None:
    """Each round is FedAvg's from where the step went, and the next begins there."""
    method, found = FedAvg(server=server), domains(NORMED)
    state, _ = run(method, found, NORMED, rounds=2)
    first, _ = run(method, found, NORMED, rounds=1)
    mean, _ = run(FedAvg(), found, NORMED, rounds=1)
    assert method.server is not None
    expected, kept = after_round(method.server, start_of(method, found, NORMED), mean.weights, {})
    assert_close(first.weights, expected)
    assert first.weights != mean.weights
    assert first.weights.select(is_buffer) == mean.weights.select(is_buffer)
    for moment, tensors in kept.items():
        assert_close(first.server[moment], tensors)
        assert list(tensors) == list(parameters_of(mean.weights))
        assert state.server[moment] != tensors


def test_sites_begin_where_nesterov_s_momentum_brings_the_model() -> None:
    """Two rounds are those of plain FedAvg, the second from the model that the first round's momentum moves on."""
    plain, found = FedAvg(), domains(NORMED)
    method = FedAvg(server={"optimizer": "momentum", "beta": 0.9, "nesterov": True})
    assert method.server is not None
    where, start = federation(plain, found, NORMED), start_of(plain, found, NORMED)
    state = step_on(plain, where, plain.start(where, start))
    first, kept = after_round(method.server, start, state.weights, {})
    moved = Weights({name: first[name] + 0.9 * move for name, move in kept["first"].items()})
    mean = step_on(plain, where, replace(state, weights=first.merge(moved))).weights
    expected, _ = after_round(method.server, first, mean, kept)
    assert_close(run(method, found, NORMED, rounds=2)[0].weights, expected)


def frozen(name: str, **options: Any) -> tuple[Weights, State, State]:
    """The common start, a round without a server's step, and one whose step is next to nothing."""
    slow = {"optimizer": "momentum", "beta": 0, "rate": 1e-12}
    method = method_of(name, **options)
    network = normed_for(method)
    states = [run(method_of(name, **options, server=s), network=network, rounds=1)[0] for s in (None, slow)]
    return start_of(method, network=network), *states


@pytest.mark.parametrize(
    ("name", "options", "own"),
    [
        ("fedbn", {}, "features.hidden1.1"),
        ("copa", {}, "classifier"),
        ("kd3a", {"private_classifier": True}, "classifier"),
    ],
)
def test_what_each_site_has_of_its_own_is_the_method_s(name: str, options: dict[str, Any], own: str) -> None:
    start, plain, slow = frozen(name, **options)
    assert plain.weights.select(own)
    assert slow.weights.select(own) == plain.weights.select(own)
    assert slow.weights.select(own) != start.select(own)
    common = [key for key in parameters_of(start) if key not in method_of(name, **options).personal(start)]
    assert common
    assert all(torch.allclose(slow.weights[key], start[key], atol=1e-9, rtol=0) for key in common)


def test_it_goes_with_a_robust_rule_and_a_preparation() -> None:
    clipped = {"rule": "norm_clipping", "bound": 1e-6}
    served = run(method_of("styles", robust=clipped, server={"optimizer": "momentum", "rate": 1e6}), rounds=1)[0]
    plain = run(method_of("styles", robust=clipped), rounds=1)[0]
    start = start_of(method_of("styles"))
    for key, tensor in served.weights.items():
        torch.testing.assert_close(tensor - start[key], 1e6 * (plain.weights[key] - start[key]))


@pytest.mark.parametrize("name", [name for name in registry.names() if name not in SERVED])
def test_what_averages_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"server: {name} .*leave it out"):
        method_of(name, server="momentum")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("adma", "did you mean 'adam'"),
        ({"optimizer": "adam", "beta3": 0.1}, "adam has no option 'beta3'; did you mean 'beta'"),
        ({"optimizer": "momentum", "beta": 1.0}, r"momentum\.beta: .*less than 1"),
        ({"beta": 0.5}, "optimizer: one of"),
        (0.9, "server"),
    ],
)
def test_wrong_options_say_what_is_right(server: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        method_of("fedavg", server=server)
    assert method_of("fedavg", server="yogi").server == Adaptive(optimizer="yogi")
