"""FedIIR: FedAvg without the penalty, the sites' gradients, their mean over rounds, the penalty by hand."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from lost import lose, site_of
from tiny import CNN, NORMED, assert_close, domains, federation, start_of, step_on

from fedshift.functional.averaging import weighted_average
from fedshift.methods.federated.fediir import FedIIR
from fedshift.weights import Weights

ONE_BATCH = {"a": 8, "b": 5}
"""Sites whose samples are one mini-batch, so that the order of the samples hardly matters."""


def gradient_at(where: object, site: str, weights: Weights) -> dict[str, torch.Tensor]:
    """By the classifier, over all samples at once; BatchNorm as in evaluation."""
    model = site_of(where, site).model(weights).eval()  # type: ignore[arg-type]
    batches = list(site_of(where, site).all_batches())  # type: ignore[arg-type]
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    loss = F.cross_entropy(model(inputs), targets)
    names = [name for name, _ in model.classifier.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.classifier.parameters())), strict=True))


def test_sites_send_their_gradient_over_all_samples() -> None:
    """Also where these are more than one batch."""
    method, found = FedIIR(), domains(NORMED, {"large": 300, "small": 5})
    where, start = federation(method, found, NORMED), start_of(method, found, NORMED)
    for site, reply in where.ask(method.measure, to=where.sources, weights=start).items():
        assert_close(reply.gradient, Weights(gradient_at(where, site, start)))
    assert where.progress.used == {"large": 0, "small": 0}


def test_the_server_s_gradient_is_the_mean_and_then_a_moving_one() -> None:
    method, found = FedIIR(ema=0.75), domains(CNN)
    where, start = federation(method, found), start_of(method, found)
    first = step_on(method, where, method.start(where, start))
    second = step_on(method, where, first)
    means = [
        weighted_average([Weights(gradient_at(where, site, weights)) for site in where.sources], [1.0] * 3)
        for weights in (start, first.weights)
    ]
    assert_close(cast(Weights, first.parts["gradient"]), means[0])
    moving = {name: 0.75 * means[0][name] + 0.25 * value for name, value in means[1].items()}
    assert_close(cast(Weights, second.parts["gradient"]), Weights(moving))


def test_training_brings_a_site_s_gradient_towards_that_of_all() -> None:
    """The penalty's own gradient is in the step: second derivatives of the cross-entropy."""
    method, found = FedIIR(penalty_weight=3.0), domains(CNN, ONE_BATCH)
    where, start = federation(method, found), start_of(method, found)
    site = site_of(where, "a")
    model, batch = site.model(start), next(iter(site.all_batches()))
    towards = Weights(gradient_at(where, "b", start))
    model.eval()
    parameters = list(model.classifier.parameters())
    step = torch.autograd.grad(method.loss_towards(site, model, towards)(batch), parameters)
    plain = F.cross_entropy(model(batch.inputs), batch.targets)
    slopes = torch.autograd.grad(plain, parameters, create_graph=True)
    gaps = [slope - other for slope, other in zip(slopes, towards.values(), strict=True)]
    bent = torch.autograd.grad(slopes, parameters, [6 * gap.detach() for gap in gaps])  # 2γ H (∇ − ḡ)
    for one, slope, more in zip(step, slopes, bent, strict=True):
        torch.testing.assert_close(one, slope.detach() + more)


def test_a_missing_site_has_no_part() -> None:
    method, found = FedIIR(), domains(CNN, ONE_BATCH)
    where, start = federation(method, found), start_of(method, found)
    lose(where, "b")
    state = step_on(method, where, method.start(where, start))
    assert_close(cast(Weights, state.parts["gradient"]), Weights(gradient_at(where, "a", start)))
    assert list(state.report["losses"]) == ["a"]
