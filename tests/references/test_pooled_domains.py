"""Steps of the pooled methods on a batch of every domain, on linear networks: the weights that DomainBed comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network, pool
from torch import nn

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.feature_alignment import coral_distance, gaussian_discrepancy
from fedshift.functional.invariance import irm_penalty
from fedshift.methods.base import Method
from fedshift.methods.pooled.cdann import CDANN, Conditional
from fedshift.methods.pooled.coral import CORAL, mean_over_pairs
from fedshift.methods.pooled.dann import DANN, Discriminator
from fedshift.methods.pooled.fish import Fish
from fedshift.methods.pooled.groupdro import DomainWeights, GroupDRO
from fedshift.methods.pooled.irm import IRM
from fedshift.methods.pooled.mldg import MLDG
from fedshift.methods.pooled.mmd import MMD
from fedshift.methods.pooled.penalty import DomainLoss, Parts
from fedshift.methods.pooled.rsc import RSC
from fedshift.methods.pooled.spectral_decoupling import SpectralDecoupling
from fedshift.methods.pooled.vrex import VREx
from fedshift.models.network import Network

pytestmark = pytest.mark.usefixtures("double")


def of_domains(reference: Reference) -> tuple[Network, list[Batch]]:
    """The network of an entry, and a batch of each domain."""
    given = reference.tensors
    batches = [
        batch(x, labels, k) for k, (x, labels) in enumerate(zip(given["x"], reference.inputs["labels"], strict=True))
    ]
    return network(linear(given["A"]), linear(given["G"]), 6, 3), batches


def steps(
    reference: Reference, method: Any, number: int = 1, others: nn.Module | None = None, optimizer: str = "sgd"
) -> tuple[Update, Site]:
    """What so many steps of a method come to, each on the same batches."""
    model, batches = of_domains(reference)
    rate = reference.parameters["rate"]
    parts = Parts(nn.Module() if others is None else others) if isinstance(method, DomainLoss) else None
    site, weights = pool(method, model, batches, rate, parts=parts, optimizer=optimizer)
    site.domains = len(batches)
    site.domain_batches = lambda steps, split: iter([(tuple(batches), None)] * number)  # type: ignore[method-assign]
    update: Update = method.fit(site, weights, steps=number)
    return update, site


def weights_agree(reference: Reference, update: Update, when: str) -> None:
    for letter, name in (("A", "features.weight"), ("G", "classifier.weight")):
        reference.agree(f"{letter} {when}", update.weights[name])


def domain_losses(reference: Reference) -> list[torch.Tensor]:
    model, batches = of_domains(reference)
    return [F.cross_entropy(model(one.inputs), one.targets) for one in batches]


@compares("pooled", "coral_1", "mmd_1")
def test_alignment_of_features(reference: Reference) -> None:
    gamma = reference.parameters["gamma"]
    features = [one @ reference.tensors["A"].T for one in reference.tensors["x"]]
    method: Method
    if reference.method == "CORAL":
        method = CORAL(setting="domainbed", moments="mean_and_covariance", penalty_weight=gamma)
        penalty = mean_over_pairs(features, lambda one, other: coral_distance(one, other, "mean_and_covariance"))
    else:
        method = MMD(penalty_weight=gamma)
        penalty = gaussian_discrepancy(features, MMD().kernels)
    plain = torch.stack(domain_losses(reference)).mean()
    reference.agree("loss without the penalty", plain)
    reference.agree("penalty", penalty)
    update, _ = steps(reference, method)
    assert update.loss == pytest.approx((plain + gamma * penalty).item())
    weights_agree(reference, update, "after the step")


def later(reference: Reference, **options: Any) -> IRM | VREx:
    """The method of an entry, as DomainBed has it."""
    common = {"penalty_weight": reference.parameters["lambda"], "penalty_start": reference.parameters["start"]}
    if reference.method == "IRM":
        return IRM(rescaled=False, estimate="halves", **common, **options)
    return VREx(rescaled=False, **common, **options)


@compares("pooled", "irm_1", "vrex_1")
def test_a_penalty_that_begins_at_a_step(reference: Reference) -> None:
    model, batches = of_domains(reference)
    losses = torch.stack(domain_losses(reference))
    if reference.method == "IRM":
        labels = [one.targets for one in batches]
        penalty = irm_penalty([model(one.inputs) for one in batches], labels, halves=True)
    else:
        penalty = losses.var(correction=0)
    reference.agree("penalty of the first step", penalty)
    one, _ = steps(reference, later(reference))
    two, _ = steps(reference, later(reference), 2)
    reference.agree("loss of the first step", one.loss)
    # DomainBed's loss of the second step has the whole penalty; a call's loss is the mean of its steps'.
    reference.agree("loss of the second step", 2 * two.loss - one.loss)
    weights_agree(reference, one, "after the first step")
    weights_agree(reference, two, "after the second step")


@compares("pooled", "irm_2", "vrex_2")
def test_adam_begins_anew_with_the_penalty(reference: Reference) -> None:
    update, _ = steps(reference, later(reference, restart_optimizer=True), 3, optimizer="adam")
    weights_agree(reference, update, "after three steps")
    other, _ = steps(reference, later(reference), 3, optimizer="adam")
    assert (other.weights["features.weight"] - update.weights["features.weight"]).abs().max() > 1e-3


@compares("pooled", "groupdro_1")
def test_weights_of_the_worst_domains(reference: Reference) -> None:
    method, found = GroupDRO(weights_rate=reference.parameters["eta"]), []
    for number, when in ((1, "after the first step"), (2, "after the second step")):
        update, site = steps(reference, method, number, DomainWeights(4))
        reference.agree(f"q {when}", site.memory.weights("parts")["others.q"])
        found.append(update.loss * number)
    reference.agree("loss of the first step", found[0])
    reference.agree("loss of the second step", found[1] - found[0])
    weights_agree(reference, update, "after two steps")


@compares("pooled", "mldg_1")
def test_episodes_of_mldg(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    order = reference.parameters["order of the domains"]
    monkeypatch.setattr(torch, "randperm", lambda number, generator: torch.tensor(order))
    method = MLDG(
        beta=reference.parameters["beta"],
        meta_test=reference.parameters["meta-test domains"],
        episodes="pairs",
        inner_optimizer="adam",
        second_order=False,
    )
    update, _ = steps(reference, method)
    reference.agree("loss that it reports", update.loss)
    weights_agree(reference, update, "after the step")


@compares("pooled", "fish_1")
def test_fish_goes_a_part_of_the_way(reference: Reference) -> None:
    method = Fish(meta_rate=reference.parameters["meta_lr"], order="fixed")
    weights_agree(reference, steps(reference, method)[0], "after a step of SGD")
    weights_agree(reference, steps(reference, method, 2, optimizer="adam")[0], "after two steps of Adam")


@compares("pooled", "sd_1", "rsc_1")
def test_methods_that_ask_for_no_domains(reference: Reference) -> None:
    options = reference.parameters
    method: Method
    if reference.method == "SD":
        method = SpectralDecoupling(penalty_weight=options["reg"], domain_batches="full")
        plain = torch.stack(domain_losses(reference)).mean()
        reference.agree("loss without the penalty", plain)
        update, _ = steps(reference, method)
        reference.agree("penalty", (update.loss - plain) / options["reg"])
    else:
        shares = {"feature_share": options["feature drop factor"], "batch_share": options["batch drop factor"]}
        update, _ = steps(reference, RSC(domain_batches="full", **shares))
        reference.agree("loss", update.loss)
    weights_agree(reference, update, "after the step")


@compares("pooled", "dann_1", "cdann_1")
def test_a_discriminator_by_turns(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters
    conditional = reference.method == "CDANN"
    judge = Conditional(6, (5,), 4, 3) if conditional else Discriminator(6, (5,), 4)
    names = {"U": "0.weight", "u": "0.bias", "V": "2.weight", "v": "2.bias"} | (
        {"E": "classes.weight"} if conditional else {}
    )
    judge.load_state_dict({name: given[letter] for letter, name in names.items()})
    method = (CDANN if conditional else DANN)(
        updates="alternate", adversarial_weight=options["lambda"], gradient_penalty=options["grad_penalty"], hidden=(5,)
    )
    one, _ = steps(reference, method, 1, judge)
    both, site = steps(reference, method, 2, judge)
    reference.agree("loss of the first step, of f and h", one.loss)
    reference.agree("loss of the second step, of D", 2 * both.loss - one.loss)
    weights_agree(reference, both, "after both")
    for letter, name in names.items():
        reference.agree(f"{letter} after both", site.memory.weights("parts")[f"others.{name}"])
