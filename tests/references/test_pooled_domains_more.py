"""Further steps on a batch of every domain, on linear networks: the weights that DomainBed comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from authors_numbers import Reference, compares
from test_pooled_domains import domain_losses, of_domains, steps, weights_agree

from fedshift.methods.pooled import domain_mixup, selfreg
from fedshift.methods.pooled.andmask import ANDMask
from fedshift.methods.pooled.causirl import CausIRL
from fedshift.methods.pooled.domain_mixup import DomainMixup
from fedshift.methods.pooled.eqrm import EQRM, density_quantile
from fedshift.methods.pooled.fishr import Fishr, Variances, gradient_variances
from fedshift.methods.pooled.ib_erm import IBERM
from fedshift.methods.pooled.selfreg import Projection, SelfReg, same_class

pytestmark = pytest.mark.usefixtures("double")


def method_of(reference: Reference) -> Any:
    """The method of an entry, as DomainBed has it."""
    options = reference.parameters
    if reference.method == "IB-ERM":
        return IBERM(penalty_weight=options["lambda"], penalty_start=options["start"])
    if reference.method == "Fishr":
        return Fishr(penalty_weight=options["lambda"], penalty_start=options["start"], decay=options["ema"])
    if reference.method == "EQRM":
        rate = options["rate after it"]
        return EQRM(quantile=options["alpha"], burn_in=options["start"], later_rate=rate, gradient="bisection")
    return ANDMask(agreement=options["tau"])


@compares("pooled", "ib_erm_1", "fishr_1", "eqrm_1", "andmask_1", "andmask_2")
def test_two_steps(reference: Reference) -> None:
    method = method_of(reference)
    parts = Variances(4, 18) if reference.method == "Fishr" else None
    one, _ = steps(reference, method, 1, parts)
    two, _ = steps(reference, method, 2, parts)
    reference.agree("loss of the first step", one.loss)
    reference.agree("loss of the second step", 2 * two.loss - one.loss)
    weights_agree(reference, one, "after the first step")
    weights_agree(reference, two, "after the second step")
    if reference.method == "Fishr":
        model, batches = of_domains(reference)
        found = torch.stack(
            [
                gradient_variances(model.features(each.inputs), model(each.inputs), each.targets, with_bias=False)
                for each in batches
            ]
        )
        reference.agree("penalty of the first step", (found - found.mean(0)).square().mean())


@compares("pooled", "causirl_coral", "causirl_mmd")
def test_two_random_mixtures(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    options = reference.parameters
    cuts = iter(options["cuts"])
    monkeypatch.setattr(torch, "randint", lambda high, size, generator: torch.tensor(next(cuts)))
    plain = torch.stack(domain_losses(reference)).mean()
    reference.agree("loss without the penalty", plain)
    update, _ = steps(reference, CausIRL(distance=options["distance"], penalty_weight=options["gamma"]))
    reference.agree("penalty", (update.loss - plain) / options["gamma"])
    weights_agree(reference, update, "after the step")


@compares("pooled", "selfreg_1")
def test_pairs_of_a_class(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = iter(reference.parameters["partners"])
    monkeypatch.setattr(selfreg, "same_class", lambda labels, draws: torch.tensor(next(orders)))
    monkeypatch.setattr(selfreg, "beta", lambda *_: torch.tensor([reference.parameters["lambda"]]))
    projection = Projection(6)
    for number, name in ((0, "P1"), (3, "P2"), (6, "P3")):
        layer = projection[number]
        layer.load_state_dict({"weight": reference.tensors[name], "bias": torch.zeros_like(layer.bias)})  # type: ignore[arg-type]
    update, _ = steps(reference, SelfReg(setting="domainbed"), 1, projection)  # type: ignore[call-arg]
    reference.agree("loss", update.loss)
    weights_agree(reference, update, "after the step")


@compares("pooled", "mixup_1")
def test_domains_in_a_circle(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    options = reference.parameters
    monkeypatch.setattr(torch, "randperm", lambda number, generator: torch.tensor(options["order of the domains"]))
    monkeypatch.setattr(domain_mixup, "beta", lambda *_: torch.tensor(options["lambda"]))
    update, _ = steps(reference, DomainMixup())
    reference.agree("loss", update.loss)
    weights_agree(reference, update, "after the step")


def test_partners_are_a_permutation_within_classes() -> None:
    labels = torch.tensor([2, 0, 1, 1, 2, 0, 0, 2])
    partners = same_class(labels, torch.Generator().manual_seed(0))
    assert torch.equal(labels[partners], labels)
    assert sorted(partners.tolist()) == list(range(8))


def test_the_variance_of_gradients_is_that_of_each_sample_s_gradient() -> None:
    features, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(5) % 3
    layer = torch.nn.Linear(4, 3)
    rows = []
    for z, label in zip(features, labels, strict=True):
        loss = torch.nn.functional.cross_entropy(layer(z), label)
        rows.append(torch.cat([one.flatten() for one in torch.autograd.grad(loss, [layer.weight, layer.bias])]))
    found = gradient_variances(features, layer(features), labels, with_bias=True)
    torch.testing.assert_close(found, torch.stack(rows).var(0, correction=0))


def test_the_gradient_of_a_quantile_is_its_slope() -> None:
    losses = torch.tensor([0.3, 1.1, 0.7, 2.0]).double().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda values: density_quantile(values, 0.75, False), losses, atol=1e-5)
    ours = density_quantile(losses, 0.75, False)
    assert density_quantile(losses, 0.75, True).item() == pytest.approx(ours.item())
    width = 1.06 * losses.detach().std() * 4**-0.2
    level = torch.distributions.Normal(losses.detach(), width).cdf(ours.detach()).mean()
    assert level.item() == pytest.approx(0.75)
