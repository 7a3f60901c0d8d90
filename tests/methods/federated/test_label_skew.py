"""Methods for sites whose classes differ: FedLC, FedNTD, FedDC. Their losses by hand, and what each is a case of."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from lost import kept, lose
from tiny import MLP, assert_close, domains, federation, run, start_of, step_on

from fedshift.data.domain import Domain
from fedshift.functional.averaging import weighted_average
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddc import FedDC
from fedshift.methods.federated.fedlc import FedLC
from fedshift.weights import Weights

SIZES = {"large": 41, "small": 5, "other": 16}


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
