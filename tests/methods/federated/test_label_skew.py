"""Methods for sites whose classes differ: FedLC, FedNTD, FedDC. Their losses by hand, and what each is a case of."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lost import kept, lose, site_of
from scipy.special import rel_entr, softmax
from tiny import MLP, assert_close, domains, federation, run, start_of, step_on

from fedshift.data.domain import Domain
from fedshift.functional.averaging import weighted_average
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddc import FedDC
from fedshift.methods.federated.fedlc import FedLC
from fedshift.methods.federated.fedntd import FedNTD
from fedshift.methods.federated.scaffold import Scaffold
from fedshift.weights import Weights

SIZES = {"large": 41, "small": 5, "other": 16}


@pytest.mark.parametrize("method", [FedLC(calibration=0), FedNTD(distillation_weight=0)], ids=["fedlc", "fedntd"])
def test_without_its_term_it_is_fedavg_bit_for_bit(method: FedAvg) -> None:
    plain, other = run(FedAvg())[0], run(method)[0]
    assert other.weights == plain.weights
    assert other.report == plain.report


def lacking(domain: Domain, label: int) -> Domain:
    """A domain without the samples of a class."""
    rows = np.flatnonzero(domain.labels != label)
    return Domain(domain.name, domain.inputs[rows], domain.labels[rows])


def test_fedlc_leaves_scores_of_a_class_that_the_site_lacks_alone() -> None:
    """The bias of that class does not move at the site; FedAvg lowers it."""
    found = [lacking(domains(MLP, {"some": 30})[0], 2)]
    start = start_of(FedLC(), found, MLP)
    moved = {kind: run(kind(), found, MLP, rounds=1)[0].weights["classifier.bias"][2] for kind in (FedLC, FedAvg)}
    assert moved[FedLC] == start["classifier.bias"][2]
    assert moved[FedAvg] < start["classifier.bias"][2]


def test_fedlc_s_loss_by_hand() -> None:
    """Of 5 samples two are of class 0, two of class 1, one of class 2."""
    method, found = FedLC(calibration=2.0), domains(MLP, SIZES)
    site = site_of(federation(method, found, MLP), "small")
    start = start_of(method, found, MLP)
    model, batch = site.model(start), next(site.all_batches())
    lowered = model(batch.inputs) - 2.0 * torch.tensor([2.0, 2.0, 1.0]) ** -0.25
    torch.testing.assert_close(method.loss_at(site, model, start)(batch), F.cross_entropy(lowered, batch.targets))


def test_fedntd_s_loss_by_hand() -> None:
    method, found = FedNTD(distillation_weight=0.7, temperature=2.0), domains(MLP, SIZES)
    state, where = run(method, found, MLP, rounds=1)
    site = site_of(where, "large")
    model, batch = site.model(start_of(method, found, MLP)), next(site.all_batches())
    far = Weights({name: 4 * value for name, value in state.weights.items()})  # so the divergence knows its direction
    scores, known = (one(batch.inputs).detach() for one in (model, site.model(far)))
    apart = []
    for row, label in enumerate(batch.targets):
        p, q = (softmax(np.delete(one[row].numpy(), label) / 2) for one in (known, scores))
        apart.append(rel_entr(p, q).sum())
    expected = F.cross_entropy(scores, batch.targets).item() + 0.7 * 4 * np.mean(apart)
    assert method.loss_at(site, model, far)(batch).item() == pytest.approx(expected, rel=1e-5)


def test_feddc_s_first_round_without_penalty_is_fedavg_s_moved_twice_as_far() -> None:
    method, found = FedDC(alpha=0), domains(MLP, SIZES)
    start = start_of(method, found, MLP)
    mean = run(FedAvg(weighting="uniform"), found, MLP, rounds=1)[0].weights
    for name, tensor in run(method, found, MLP, rounds=1)[0].weights.items():
        torch.testing.assert_close(tensor, 2 * mean[name] - start[name], atol=1e-5, rtol=1e-4)


def test_feddc_s_site_steps_without_penalty_are_scaffold_s() -> None:
    found = domains(MLP, SIZES)
    plain, method = Scaffold(), FedDC(alpha=0)
    start = start_of(method, found, MLP)
    own, other = (run(one, found, MLP, rounds=1)[1] for one in (method, plain))
    control = Weights({name: torch.full_like(value, 0.01) for name, value in start.items()})
    asked = {"weights": start, "control": control}
    sent = dict(own.ask(method.train, to=own.sources, **asked).items())
    for site, update in other.ask(plain.train, to=other.sources, **asked).items():
        assert_close(sent[site].weights, update.weights)
        assert_close(sent[site].control, update.control)


def test_the_server_s_drift_is_the_mean_of_the_sites_of_which_one_was_missing() -> None:
    method, found = FedDC(alpha=0.3), domains(MLP, SIZES)
    where = federation(method, found, MLP, rounds=3)
    state = step_on(method, where, method.start(where, start_of(method, found, MLP)))
    before, sent = {site: kept(where, site, "drift").clone() for site in SIZES}, state.weights
    lose(where, "other")
    state = step_on(method, where, state)
    after = {site: kept(where, site, "drift") for site in ("large", "small")}
    drift = cast(Weights, state.parts["drift"])
    assert_close(drift, weighted_average([*after.values(), before["other"]], [1.0] * 3))
    for name, tensor in state.weights.items():  # the mean of the models that came, and the whole drift
        steps = [after[site][name] - before[site][name] for site in after]
        torch.testing.assert_close(tensor, sent[name] + sum(steps) / 2 + drift[name], atol=1e-6, rtol=1e-5)
