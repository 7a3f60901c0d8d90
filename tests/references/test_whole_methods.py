"""Whole rounds of federated methods on a linear network with full batches: the models of the authors' own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny
import torch
from authors_numbers import Reference, compares
from lost import kept, lose, site_of
from tiny import LINEAR, federation, step_on
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.federation.federation import Federation
from fedshift.federation.site import Site
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.federated import fediir
from fedshift.methods.federated.afl import AgnosticFederated, ascended_weights
from fedshift.methods.federated.alone import Alone
from fedshift.methods.federated.copa import COPA
from fedshift.methods.federated.feddg_ga import GeneralizationAdjustment, Judged
from fedshift.methods.federated.fediir import FedIIR
from fedshift.methods.federated.oracle import Oracle
from fedshift.methods.federated.scaffold import Scaffold
from fedshift.methods.federated.shot import members_by_name
from fedshift.methods.heads import with_block
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.pooled.source_only import SourceOnly
from fedshift.models.network import Network
from fedshift.weights import Weights

AS_RELEASED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "feddyn_4": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "feddyn_5": ({"name": "feddyn", "alpha": 0.1, "setting": "released"}, {}),
    "feddc_1": ({"name": "feddc", "alpha": 0.01}, {}),
    "feddc_2": ({"name": "feddc", "alpha": 0.5}, {}),
    "scaffold_3": ({"name": "scaffold"}, {}),
    "fediir_4": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_5": ({"name": "fediir", "setting": "released", "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fediir_6": ({"name": "fediir", "ema": 0.0, "penalty_weight": 2.0}, {"momentum": 0.9}),
    "fedomg_6": ({"name": "fedomg", "setting": "released"}, {}),
    "fedsam_2": ({"name": "fedsam"}, {}),
    "fedasam_2": ({"name": "fedsam", "setting": "asam_released"}, {}),
    "fedprox_2": ({"name": "fedprox", "proximal_weight": 0.3}, {}),
    "fednova_6": ({"name": "fednova", "local_epochs": 1}, {"batch_size": 4}),
    "fednova_7": ({"name": "fednova", "local_epochs": 1}, {"batch_size": 4, "momentum": 0.9}),
    "fednova_8": (
        {"name": "fednova", "local_epochs": 1, "proximal_weight": 0.5, "effective_steps": "steps"},
        {"batch_size": 4},
    ),
    "fedfish_1": ({"name": "fedfish", "meta_rate": 0.3, "order": "fixed", "local_epochs": 1}, {}),
    "fedvrex_1": ({"name": "fedvrex", "penalty_weight": 4.0, "local_epochs": 1}, {}),
}
"""The method and the training that an entry's parameters mean."""


def start_of(reference: Reference) -> Weights:
    """The common model before the first round."""
    parts = {f"classifier.{name}": reference.tensors[name].float() for name in ("weight", "bias")}
    return Weights(parts)


def sites_of(reference: Reference) -> list[Domain]:
    """The sites: of FedNova with as many equal samples as make its batches, else with the samples of the entry."""
    if reference.method == "FedNova":
        labels = reference.inputs["label of site 0, 1, 2"]
        return [
            Domain(f"site{k}", reference.tensors[f"the sample of site {k}"].float().expand(n, 3).numpy(), np.full(n, y))
            for k, (n, y) in enumerate(zip(reference.parameters["samples"], labels, strict=True))
        ]
    return [
        Domain(f"site{k}", reference.tensors[f"x{k}"].float().numpy(), np.array(reference.inputs[f"labels{k}"]))
        for k in range(3)
    ]


def states_of(reference: Reference, method: Mapping[str, Any], training: Mapping[str, Any]) -> list[State]:
    """What the server knows after each round."""
    found, rounds = sites_of(reference), len(reference.outputs["models"])
    made = registry.parse({"local_epochs": 2, **method})
    options = {"lr": reference.parameters["lr"], "momentum": 0.0, "batch_size": 64, **training}
    where = federation(made, found, LINEAR, rounds=rounds, **options)
    state = made.start(where, start_of(reference))
    where.settle()
    states = []
    for _ in range(rounds):
        state = step_on(made, where, state)
        states.append(state)
    return states


def numbers_of(states: list[State]) -> list[dict[str, Tensor]]:
    """The common models, as they stand in an entry."""
    return [{name: state.weights[f"classifier.{name}"] for name in ("weight", "bias")} for state in states]


@compares("federated", *AS_RELEASED)
def test_the_models_are_those_of_the_authors_code(reference: Reference) -> None:
    reference.agree("models", numbers_of(states_of(reference, *AS_RELEASED[reference.id])))


@compares("federated", "fedirm_1")
def test_federated_irm_s_models(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves are every second sample, so a mini-batch has to keep the order of its samples."""
    monkeypatch.setattr(torch, "randperm", lambda number, **_: torch.arange(number))
    weight = reference.parameters["lambda"]
    method = {"name": "fedirm", "penalty_weight": weight, "estimate": "halves", "local_epochs": 1}
    reference.agree("models", numbers_of(states_of(reference, method, {})))


@compares("federated", "afl_1")
def test_afl_s_projection_on_the_simplex(reference: Reference) -> None:
    points = list(reference.tensors.values())
    reference.agree("projected", [ascended_weights(torch.zeros(len(point)), point, 1.0) for point in points])


@compares("federated", "afl_3")
def test_afl_s_exponential_step(reference: Reference) -> None:
    weights = torch.tensor(reference.inputs["weights"], dtype=torch.float64)
    steps = zip(reference.tensors.values(), reference.parameters["gamma"], strict=True)
    reference.agree("weights", [ascended_weights(weights, losses, rate, exponential=True) for losses, rate in steps])


@compares("federated", "afl_2", "afl_4")
def test_afl_s_weights_and_its_step_with_them(reference: Reference) -> None:
    start, options = start_of(reference), reference.parameters
    rule: Any = "exponential" if reference.id == "afl_4" else "projected"
    method = AgnosticFederated(weights_rate=options["gamma"], rule=rule, local_epochs=1)
    (state,), _ = played(method, sites_of(reference), start, 1, lr=options["lr"], batch_size=64)
    (model,) = numbers_of([state])
    reference.agree("weights", list(state.report["aggregation_weights"].values()))
    reference.agree("model_of_a_step_with_them", model)
    reference.agree("model", model)


class OnLayer(COPA):
    """COPA on a linear feature extractor, with given features and classifiers at the start."""

    traits = COPA.traits.derive(name="on_layer")
    start_with: ClassVar[Mapping[str, Tensor]] = {}

    def adapt_network(self, network: Network, sources: int) -> Network:
        whole = with_block(network, lambda width: nn.Linear(width, 3), size=3, classifier=nn.Linear)
        adapted = super().adapt_network(whole, sources)
        adapted.load_state_dict(dict(self.start_with))
        return adapted


@compares("federated", "copa_1")
def test_copa_s_rounds(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters
    names = {"feature": "features.block", **{f"head{k}": f"classifier.heads.{k}" for k in range(3)}}
    kinds = ("weight", "bias")
    OnLayer.start_with = {
        f"{ours}.{kind}": given[f"{theirs} {kind}"].float() for theirs, ours in names.items() for kind in kinds
    }
    method = OnLayer(hybrid_normalisation=False, local_epochs=options["epochs"])
    states, _ = played(
        method, sites_of(reference), Weights(OnLayer.start_with), options["rounds"], lr=options["lr"], batch_size=64
    )
    models = [
        {
            **{f"feature {kind}": state.weights[f"features.block.{kind}"] for kind in kinds},
            "heads": [[state.weights[f"classifier.heads.{k}.{kind}"] for kind in kinds] for k in range(3)],
        }
        for state in states
    ]
    reference.agree("models", models)
    reference.agree("shares", list(states[-1].report["aggregation_weights"].values()))


@compares("pooled", "erm_1")
def test_plain_training_on_all_samples(reference: Reference) -> None:
    """Of a pool, of a target with labels, and of a site that trains alone."""
    start, found, lr = start_of(reference), sites_of(reference), reference.parameters["lr"]
    inputs, labels = (np.concatenate([getattr(domain, part) for domain in found]) for part in ("inputs", "labels"))
    whole = [Domain("whole", inputs, labels)]
    for method in (DeepAll(), SourceOnly(), Oracle()):
        at = whole if isinstance(method, Oracle) else found
        states, _ = played(method, at, start, 3, lr=lr, batch_size=64, budget=3)
        reference.agree("models", numbers_of(states))
    alone = Alone()
    where = federation(alone, whole, LINEAR, rounds=3, lr=lr, momentum=0.0, batch_size=64)
    site_of(where, "whole").memory["model"] = start
    state, members = alone.start(where, start), []
    for _ in range(3):
        state = step_on(alone, where, state)
        model = members_by_name(state.weights, ("whole",))["whole"]
        members.append({name: model[f"classifier.{name}"] for name in ("weight", "bias")})
    reference.agree("models", members)


@compares("federated", "feddg-ga_4")
def test_generalization_adjustment_s_models_and_weights(reference: Reference) -> None:
    released = {"name": "feddg_ga", "setting": "released", "local_epochs": 1}
    states = states_of(reference, released, {})
    reference.agree("models", numbers_of(states))
    used = [list(state.report["aggregation_weights"].values()) for state in states]
    reference.agree("weights_used_in_round", used)
    earlier = states_of(reference, {**released, "late_step": False}, {})
    reference.agree("models_of_the_code_with_fedshifts_steps", numbers_of(earlier))


# Methods whose mini-batches an entry names one by one ----------------------------------------------------------------

STILL = 1e-12
"""A learning rate at which no number of a model moves."""


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's mini-batches in the order of its samples, of two classes."""
    monkeypatch.setattr(tiny, "CLASSES", 2)
    monkeypatch.setattr(torch, "randperm", lambda number, **_: torch.arange(number))


def batched_sites(reference: Reference) -> list[Domain]:
    """Sites with the mini-batches of the entry, one after the other."""
    sites = []
    for k in range(3):
        names = [name for name in reference.tensors if name.startswith(f"x{k}_batch")]
        inputs = torch.cat([reference.tensors[name] for name in names]).float().numpy()
        labels = np.concatenate([reference.inputs[name.replace("x", "labels", 1)] for name in names])
        sites.append(Domain(f"site{k}", inputs, labels))
    return sites


def listed(model: Mapping[str, Tensor]) -> list[list[Any]]:
    """[weight, bias] of a classifier, as lists."""
    weight, bias = (
        next(value for name, value in model.items() if name.endswith(end)).tolist() for end in ("weight", "bias")
    )
    return [weight, bias]


def played(
    method: Method, found: Sequence[Domain], start: Weights, rounds: int, **training: Any
) -> tuple[list[State], Federation]:
    """What the server knows after each round, and the sites."""
    where = federation(method, found, LINEAR, rounds=rounds, **{"momentum": 0.0, **training})
    state, states = method.start(where, start), []
    where.settle()
    for _ in range(rounds):
        state = step_on(method, where, state)
        states.append(state)
    return states, where


@pytest.mark.usefixtures("in_order")
@compares("federated", "scaffold_1", "scaffold_2")
def test_scaffold_s_rounds_of_which_one_lacks_a_site(reference: Reference) -> None:
    rate = reference.parameters["server_learning_rate"]
    method = Scaffold(local_epochs=1, server={"optimizer": "momentum", "beta": 0.0, "rate": rate})  # type: ignore[arg-type]
    where = federation(method, batched_sites(reference), LINEAR, rounds=2, lr=0.1, momentum=0.0, batch_size=4)
    start = Weights({f"classifier.{name}": reference.tensors[name].float() for name in ("weight", "bias")})
    state, rounds = method.start(where, start), []
    where.settle()
    for number in range(2):
        if number == 1:
            lose(where, "site1")
        state = step_on(method, where, state)
        control: Any = state.parts["control"]
        sites = [listed(kept(where, f"site{k}", "control")) for k in range(3)]
        rounds.append({"x": listed(state.weights), "c": listed(control), "site_controls": sites})
    reference.agree("rounds", rounds)


class WithFeaturizer(FedIIR):
    """FedIIR on a linear feature extractor before the linear classifier."""

    traits = FedIIR.traits.derive(name="with_featurizer")

    def adapt_network(self, network: Network, sources: int) -> Network:
        return with_block(network, lambda width: nn.Linear(width, 3), size=3, classifier=nn.Linear)


@pytest.mark.usefixtures("in_order")
@compares("federated", "fediir_1")
def test_fediir_s_rounds_with_unequal_sites(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    options, found = reference.parameters, batched_sites(reference)
    names = {"featurizer": "features.block", "classifier": "classifier"}
    start = Weights(
        {
            f"{ours}.{kind}": reference.tensors[f"{theirs}.{kind}"].float()
            for theirs, ours in names.items()
            for kind in ("weight", "bias")
        }
    )
    method = WithFeaturizer(setting="released", penalty_weight=options["penalty"], ema=options["ema"], local_epochs=1)
    training = {"batch_size": 4, "momentum": options["momentum"]}
    gaps: list[float] = []
    plain = fediir.gradient_gap

    def watched(gradients: Sequence[Tensor], references: Sequence[Tensor]) -> Tensor:
        gap = plain(gradients, references)
        gaps.append(float(gap))
        return gap

    monkeypatch.setattr(fediir, "gradient_gap", watched)
    states, _ = played(method, found, start, options["rounds"], lr=options["lr"], **training)
    gradients: list[Any] = [state.parts["gradient"] for state in states]
    reference.agree("gradient_mean", [listed(gradient) for gradient in gradients])
    reference.agree("classifier_weight", [state.weights["classifier.weight"].tolist() for state in states])
    reference.agree("featurizer_bias", [state.weights["features.block.bias"].tolist() for state in states])
    reference.agree("penalty_of_last_batch", gaps[5::6])
    fixed: list[Any] = [state.parts["gradient"] for state in played(method, found, start, 3, lr=STILL, **training)[0]]
    reference.agree("gradient_means_at_the_fixed_start_model", [listed(gradient) for gradient in fixed])


@pytest.mark.usefixtures("in_order")
@compares("federated", "fediir_3")
def test_fediir_s_moving_mean(reference: Reference) -> None:
    found = [
        Domain(f"site{k}", reference.tensors[f"features{k}"].float().numpy(), np.array(reference.inputs[f"labels{k}"]))
        for k in range(3)
    ]
    start = Weights({f"classifier.{name}": reference.tensors[name].float() for name in ("weight", "bias")})
    without = FedIIR(setting="released", ema=0.0, penalty_weight=0.0, local_epochs=1)
    mean: Any = played(without, found, start, 1, lr=STILL)[0][0].parts["gradient"]
    method = FedIIR(setting="released", penalty_weight=1.0, local_epochs=1)
    states, where = played(method, found, start, 40, lr=STILL, budget=1000)
    moving: dict[str, Any] = {f"round_{number}": states[number - 1].parts["gradient"] for number in (1, 2, 3, 40)}
    reference.agree("mean_gradient", listed(mean))
    reference.agree("moving_mean", {name: listed(value) for name, value in moving.items()})
    shares = {name: float(value["bias"][0] / mean["bias"][0]) for name, value in moving.items()}
    reference.agree("share_of_a_constant_gradient", shares)
    site = site_of(where, "site0")
    model, batch = site.model(start), next(site.all_batches())
    whole = method.loss_towards(site, model, moving["round_1"])(batch)
    penalty = whole - site.objective.loss(model(batch.inputs), batch.targets)
    reference.agree("penalty_site0_towards_round_1", penalty)
    reference.agree("penalty_gradient_weight", torch.autograd.grad(penalty, model.classifier.weight)[0])


class Scripted(GeneralizationAdjustment):
    """Generalization adjustment whose sites say what a script has."""

    traits = GeneralizationAdjustment.traits.derive(name="scripted")
    common: tuple[tuple[float, ...], ...]
    own: tuple[tuple[float, ...], ...]

    def train(self, site: Site, weights: Weights) -> Judged:
        known, number = site.envelope.round - 2, int(site.name.removeprefix("site"))
        common, own = ((rows[known][number] if known >= 0 else 0.0) for rows in (self.common, self.own))
        return Judged(weights, site.samples, 0.0, common, own)


@compares("federated", "feddg-ga_1", "feddg-ga_2", "feddg-ga_3")
def test_generalization_adjustment_s_weights(reference: Reference) -> None:
    """An accuracy counts as one minus it. The code's step is a third, whatever the number of sites is."""
    common, own = (
        tuple(tuple(1 - x if reference.id == "feddg-ga_1" else x for x in row) for row in reference.inputs[name])
        for name in ("common model by round and site", "own model by round and site")
    )
    count, planned = reference.parameters["K"], reference.parameters["rounds_R"]
    found = [Domain(f"site{k}", np.ones((2, 3), np.float32), np.array([0, 1])) for k in range(count)]
    start = Weights({"classifier.weight": torch.zeros(3, 3), "classifier.bias": torch.zeros(3)})

    def weights(step: float) -> list[list[float]]:
        method = Scripted(setting="released", step=step, common=common, own=own)
        where = federation(method, found, LINEAR, rounds=planned)
        state, used = method.start(where, start), []
        where.settle()
        for _ in range(4):
            state = step_on(method, where, state)
            used.append(list(state.report["aggregation_weights"].values()))
        return used[1:]

    reference.agree("weights", weights(reference.parameters["step_size"]))
    as_if_three = torch.tensor(weights(reference.parameters["step_size"] * count / 3))
    torch.testing.assert_close(as_if_three, torch.tensor(reference.outputs["weights"]), atol=1e-7, rtol=0)
