"""What is FedAvg where a method's own term is off, and is not where it is on."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import CNN, MLP, NORMED, assert_close, domains, run

from fedshift.methods.base import Method
from fedshift.methods.federated.afl import AgnosticFederated
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.feddg_ga import GeneralizationAdjustment
from fedshift.methods.federated.fedgma import FedGMA
from fedshift.methods.federated.fediir import FedIIR
from fedshift.methods.federated.fedirm import FederatedIRM
from fedshift.methods.federated.fedlc import FedLC
from fedshift.methods.federated.fedntd import FedNTD
from fedshift.methods.federated.fedomg import FedOMG
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.federated.fedsam import FedSAM
from fedshift.methods.federated.fedvrex import FederatedVREx

TWICE: dict[str, Any] = {"local_epochs": 2, "weighting": "uniform"}
EQUAL = FedAvg(weighting="uniform")
FAST: dict[str, Any] = {"network": NORMED, "momentum": 0.9}
ONE_BATCH = {"found": domains(CNN, {"large": 7, "small": 5, "other": 6}), "momentum": 0.9}


@pytest.mark.parametrize(
    ("method", "plain", "options"),
    [
        (FedProx(**TWICE, proximal_weight=0), FedAvg(**TWICE), {}),
        (FedLC(calibration=0), FedAvg(), {}),
        (FedNTD(distillation_weight=0), FedAvg(), {}),
        (FedSAM(radius=0, adaptive=False), FedAvg(), FAST),
        (FedSAM(radius=0, adaptive=True), FedAvg(), FAST),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_it_is_fedavg_bit_for_bit(method: Method, plain: Method, options: dict[str, Any]) -> None:
    result, expected = (run(each, **options)[0] for each in (method, plain))
    assert (result.weights, result.report) == (expected.weights, expected.report)


@pytest.mark.parametrize(
    ("method", "plain", "options"),
    [
        (AgnosticFederated(weights_rate=0), EQUAL, {"network": MLP}),
        (GeneralizationAdjustment(step=0), EQUAL, {"network": MLP}),
        (FederatedVREx(penalty_weight=0.0), EQUAL, {"network": MLP}),
        (FederatedVREx(penalty_start=9), EQUAL, {"network": MLP}),
        (FederatedIRM(penalty_weight=0.0), EQUAL, {"network": MLP}),
        (FedGMA(agreement=0.0), FedAvg(), {"network": MLP}),
        (FedOMG(kappa=0), EQUAL, {"network": MLP}),
        (FedIIR(penalty_weight=0), FedAvg(), ONE_BATCH),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_it_is_fedavg_but_for_rounding(method: Method, plain: Method, options: dict[str, Any]) -> None:
    result, expected = (run(each, **options)[0] for each in (method, plain))
    assert_close(expected.weights, result.weights)
    if "aggregation_weights" in result.report:
        assert result.report["aggregation_weights"] == pytest.approx(expected.report["aggregation_weights"])


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (FedProx(steps_per_round=1, proximal_weight=5), FedAvg(steps_per_round=1)),
        (FedProx(steps_per_round=2), FedAvg(steps_per_round=2)),
        (FedIIR(penalty_weight=1), FedAvg()),
    ],
    ids=["the first step", "the second step", "fediir"],
)
def test_from_the_second_step_on_it_is_another(method: Method, plain: Method) -> None:
    """At w = w_global FedProx's penalty and its gradient are zero."""
    same = run(method, rounds=1)[0].weights == run(plain, rounds=1)[0].weights
    assert same == (getattr(method, "steps_per_round", None) == 1)
