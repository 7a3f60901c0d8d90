"""SCAFFOLD: FedAvg in its first round, a corrected step, steps that are not epochs, and a missing site."""

from __future__ import annotations

import pytest
import torch
from lost import kept, lose, site_of
from tiny import MLP, NORMED, domains, federation, run, start_of, step_on

from fedshift.errors import UserError
from fedshift.functional.averaging import parameters_of
from fedshift.functional.control_variates import normalising_factor
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddc import FedDC
from fedshift.methods.federated.scaffold import Scaffold
from fedshift.weights import Weights

SIZES = {"large": 41, "small": 5, "other": 16}


def control_of(state: object) -> Weights:
    return state.parts["control"]  # type: ignore[attr-defined, no-any-return]


def test_the_first_round_is_fedavg_s_bit_for_bit() -> None:
    options = {"network": NORMED, "rounds": 1, "momentum": 0.9}
    corrected = run(Scaffold(local_epochs=2), **options)[0]  # type: ignore[arg-type]
    plain = run(FedAvg(local_epochs=2, weighting="uniform"), **options)[0]  # type: ignore[arg-type]
    assert corrected.weights == plain.weights
    assert corrected.report["losses"] == plain.report["losses"]
    longer = {**options, "rounds": 2}
    assert run(Scaffold(), **longer)[0].weights != run(FedAvg(weighting="uniform"), **longer)[0].weights  # type: ignore[arg-type]


def test_a_step_of_the_second_round_by_hand() -> None:
    """y_i = x − η(g − c_i + c): FedAvg's step from there, and η(c_i − c)."""
    found = domains(MLP, SIZES)
    method, plain = Scaffold(steps_per_round=1), FedAvg(steps_per_round=1, weighting="uniform")
    state, where = run(method, found, MLP, rounds=1, momentum=0.0, lr=0.1)
    begun, other = run(plain, found, MLP, rounds=1, momentum=0.0, lr=0.1)
    assert begun.weights == state.weights
    common = control_of(state)
    own = {site: kept(where, site, "control") for site in SIZES}
    sent = dict(where.ask(method.train, to=where.sources, weights=state.weights, control=common).items())
    steps = dict(other.ask(plain.fit, to=other.sources, weights=state.weights).items())  # type: ignore[attr-defined]
    for site, update in sent.items():
        for name, tensor in update.weights.items():
            expected = steps[site].weights[name] + 0.1 * (own[site][name] - common[name])
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)
        assert update.loss == steps[site].loss, "the correction is no part of the loss"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_variates_count_steps_and_not_epochs(momentum: float) -> None:
    """After the first round c_i = (x − y_i)/(T·η), with T mini-batches, or the plain steps that they amount to."""
    found, method = domains(NORMED, SIZES), Scaffold(local_epochs=2)
    start = start_of(method, found, NORMED)
    where = federation(method, found, NORMED, rounds=1, momentum=momentum, lr=0.1)
    begun = method.start(where, start)
    replies = dict(where.ask(method.train, to=where.sources, weights=start, control=control_of(begun)).items())
    for site, per_epoch in (("large", 5), ("small", 1), ("other", 2)):
        own = kept(where, site, "control")
        assert list(own) == list(parameters_of(start))
        for name, tensor in own.items():
            path = 0.1 * normalising_factor(2 * per_epoch, momentum)
            expected = (start[name] - replies[site].weights[name]) / path
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)
        assert replies[site].control == own, "it was zero before"


@pytest.mark.parametrize("method", [Scaffold(), FedDC()])
def test_a_missing_site_leaves_its_part_of_the_control_variate(method: Scaffold) -> None:
    """c moves by the sum of the changes over all sites, x by the mean of those that answered."""
    found = domains(MLP, SIZES)
    state, where = run(method, found, MLP, rounds=1)
    before = {site: kept(where, site, "control").clone() for site in SIZES}
    lose(where, "other")
    after = step_on(method, where, state)
    assert list(after.report["losses"]) == ["large", "small"]
    assert kept(where, "other", "control") == before["other"]
    for name, tensor in control_of(after).items():
        moved = sum(kept(where, site, "control")[name] - before[site][name] for site in ("large", "small"))
        torch.testing.assert_close(tensor, control_of(state)[name] + moved / 3, atol=1e-6, rtol=1e-5)


def test_a_control_variate_under_a_schedule_is_the_mean_of_the_steps_gradients() -> None:
    """Option II, c_i⁺ = c_i − c + (x − y_i)/Σ η_t. With c_i = c = 0 and steps of unequal rates this is the mean of the
    steps' gradients weighed by their rates, which is taken here from the gradients themselves."""
    found, method = domains(MLP, {"large": 41}), Scaffold(local_epochs=1)
    options = {"momentum": 0.0, "lr": 0.2, "lr_schedule": "linear", "lr_step": "mini_batch"}
    where = federation(method, found, MLP, rounds=1, budget=6, **options)
    site, start = site_of(where, "large"), start_of(method, found, MLP)
    gradients: list[dict[str, torch.Tensor]] = []
    rates: list[float] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *arguments: object) -> object:
        names = [name for name, _ in watched_model[0].named_parameters()]
        values = [value for group in self.param_groups for value in group["params"]]
        gradients.append({n: v.grad.clone() for n, v in zip(names, values, strict=True) if v.grad is not None})
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments)  # type: ignore[arg-type]

    watched_model: list[torch.nn.Module] = []
    build = site.model
    site.model = lambda weights=None: watched_model.append(build(weights)) or watched_model[-1]  # type: ignore[method-assign, func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", watched)
        list(where.ask(method.train, to=where.sources, weights=start, control=control_of(method.start(where, start))))
    assert len(set(rates)) == len(rates) == 5, "every step has a rate of its own"
    for name, value in kept(where, "large", "control").items():
        mean = sum(rate * gradient[name] for rate, gradient in zip(rates, gradients, strict=True)) / sum(rates)
        torch.testing.assert_close(value, mean, atol=1e-5, rtol=1e-4)


def test_adam_is_refused() -> None:
    with pytest.raises(UserError, match=r"scaffold needs training\.optimizer: sgd"):
        run(Scaffold(), rounds=1, optimizer="adam")
