"""Losses on a batch of every domain, by hand, where DomainBed's functions do not reach: the papers' own forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooled_step import assert_same, pool
from torch import Tensor, nn

from fedshift.federation.site import Batch, Site
from fedshift.functional.invariance import irm_penalty
from fedshift.functional.schedules import ramp
from fedshift.methods.pooled.dann import DANN, Discriminator
from fedshift.methods.pooled.groupdro import GroupDRO
from fedshift.methods.pooled.mldg import MLDG
from fedshift.methods.pooled.penalty import DomainLoss, Parts, Step
from fedshift.methods.pooled.vrex import VREx

RATE = 0.05


def first_batches(site: Site) -> tuple[Batch, ...]:
    return next(site.domain_batches(1))[0]


def step_of(site: Site, model: Any, method: DomainLoss, number: int = 0) -> Step:
    """The first step, as `DomainLoss.fit` would make it."""
    others = method.build_parts(model, site.domains)
    draws = site.generator_for("step draws")
    return Step(number, site, model, others, site.optimizer(model), first_batches(site), draws)


def test_steps_are_those_of_the_run_not_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, loss = list[int](), VREx.loss
    monkeypatch.setattr(VREx, "loss", lambda self, step: (numbers.append(step.number), loss(self, step))[1])
    method = VREx(penalty_start=3, penalty_weight=5.0, weight_before=0.0, rescaled=False)
    site, weights, _ = pool(method)
    for done in (2, 4):
        method.fit(site, weights, steps=2 * site.domains)
        assert int(site.memory.weights("parts")["done"]) == done
    assert numbers == [0, 1, 2, 3]


def test_a_loss_is_divided_by_a_weight_above_1_alone() -> None:
    for weight, by in ((4.0, 4.0), (0.5, 1.0)):
        site, weights, _ = pool(VREx())
        model = site.model(weights)
        whole, divided = (
            method.loss(step_of(site, model, method))
            for method in (VREx(penalty_start=0, penalty_weight=weight, rescaled=flag) for flag in (False, True))
        )
        torch.testing.assert_close(divided, whole / by)


@pytest.mark.parametrize("halves", [False, True])
def test_irm_s_derivative_is_that_of_autograd(halves: bool) -> None:
    logits, labels = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    scale = torch.ones((), requires_grad=True)

    def by_scale(rows: slice) -> Tensor:
        return torch.autograd.grad(F.cross_entropy(scale * logits[rows], labels[rows]), scale)[0]

    wanted = by_scale(slice(0, None, 2)) * by_scale(slice(1, None, 2)) if halves else by_scale(slice(None)).square()
    torch.testing.assert_close(irm_penalty([logits], [labels], halves=halves), wanted)


def test_a_domain_with_one_sample_has_no_halves_and_is_squared() -> None:
    logits, labels = torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([1])
    by_scale = float((logits.softmax(1) * logits).sum() - logits[0, 1])
    assert float(irm_penalty([logits], [labels], halves=True)) == pytest.approx(by_scale**2)


def test_smaller_domains_of_groupdro_have_more_added() -> None:
    """q_e grows by exp(η (L_e + C/√n_e))."""
    method = GroupDRO(weights_rate=0.5, adjustment=3.0)
    site, weights, _ = pool(method)
    step = step_of(site, site.model(weights), method)
    sizes = torch.bincount(site.data.domain_numbers.flatten()).float()
    q = (0.5 * (step.losses.detach() + 3.0 / sizes.sqrt())).softmax(0)
    torch.testing.assert_close(method.loss(step), (q * step.losses).sum())


@pytest.mark.parametrize("held_out", [1, 2])
def test_an_episode_of_mldg_as_the_paper_has_it(held_out: int) -> None:
    """∇[F(θ) + β G(θ − α ∇F(θ))], through the inner step, by a step of the parameters in place."""
    method = MLDG(beta=0.7, inner_rate=0.3, meta_test=held_out)
    site, weights, _ = pool(method)
    model = site.model(weights)
    step = step_of(site, model, method)
    order = torch.randperm(site.domains, generator=site.generator_for("step draws")).tolist()
    train, test = ([step.batches[number] for number in part] for part in (order[:-held_out], order[-held_out:]))
    parameters = dict(model.named_parameters())
    near = torch.stack([F.cross_entropy(model(one.inputs), one.targets) for one in train]).mean()
    gradients = torch.autograd.grad(near, list(parameters.values()), create_graph=True)
    ahead = {name: value - 0.3 * g for (name, value), g in zip(parameters.items(), gradients, strict=True)}
    answers = [torch.func.functional_call(model, ahead, (one.inputs,)) for one in test]
    far = torch.stack([F.cross_entropy(logits, one.targets) for logits, one in zip(answers, test, strict=True)]).mean()
    wanted = torch.autograd.grad(near + 0.7 * far, list(parameters.values()))
    found = torch.autograd.grad(method.loss(step), list(parameters.values()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_reversal_of_dann_by_hand() -> None:
    """Features go down L − λ r ℓ_D with r the ramp after the first step, the classifier down L, D down ℓ_D."""
    method = DANN(hidden=(5,), adversarial_weight=2.0)
    site, weights, _ = pool(method)
    site.begin(type(site.envelope)(1, 1, 0.25, 400))
    model = site.model(weights)
    parts = method.parts(site, lambda: Parts(method.build_parts(model, site.domains)))
    judge = parts.others
    assert isinstance(judge, Discriminator)
    batches = first_batches(site)
    features = model.features(torch.cat([one.inputs for one in batches]))
    plain = torch.stack([F.cross_entropy(model(one.inputs), one.targets) for one in batches]).mean()
    told = F.cross_entropy(judge(features), torch.cat([one.domains for one in batches]))
    strength = 2.0 * ramp(0.25 + 0.75 * site.mini_batches / 400)
    modules: list[tuple[nn.Module, Tensor]] = [
        (model.features, plain - strength * told), (model.classifier, plain), (judge, told)
    ]  # fmt: skip
    gradients = [torch.autograd.grad(loss, list(one.parameters()), retain_graph=True) for one, loss in modules]
    with torch.no_grad():
        for (module, _), found in zip(modules, gradients, strict=True):
            for parameter, gradient in zip(module.parameters(), found, strict=True):
                parameter -= RATE * gradient
    site.begin(type(site.envelope)(1, 1, 0.25, 400))
    update = method.fit(site, weights, steps=site.domains)
    assert_same(update.weights, model)
    for name, value in judge.state_dict().items():
        torch.testing.assert_close(site.memory.weights("parts")[f"others.{name}"], value)
