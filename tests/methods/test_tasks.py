"""Tasks beside classification: every method that names one learns it, and what it adds to the loss is at work."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from every_method import QUICK, method_of, mostly_slow
from tiny import IMAGE, VECTOR, normed_for, plans, setting, step_on

from fedshift.data.domain import Domain
from fedshift.data.tasks.objective import Objective, objective_of
from fedshift.errors import UserError
from fedshift.evaluation.measuring import concordance
from fedshift.experiment.fits.tasks import method_fits
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.composition.local import PLUG_INS
from fedshift.methods.heads import Experts
from fedshift.methods.index import ENTRIES
from fedshift.methods.rounds import finish_run, start_run
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.weights import Weights

OBJECTIVES: dict[str, dict[str, Any]] = {
    "regression": {"task": "regression", "mean": 50.0, "std": 10.0},
    "time_to_event": {"task": "time_to_event"},
    "multi_label": {"task": "multi_label"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fada": {"variant": "I"},
    "elcfs": {"setting": "light"},
    "metareg": {"meta_share": 0.4},
    "pfedme": {"local_epochs": 6, "proximal_weight": 2.0},
    "per_fedavg": {"local_epochs": 6},
}
"""What a method needs where labels are no classes, or what keeps its run short."""
WITHOUT_ITS_TERM: dict[str, dict[str, Any]] = {
    "recipe": {"dropout": 0.0},
    "fediir": {"penalty_weight": 0.0},
    "fedvrex": {"penalty_weight": 0.0},
    "fedl2r": {"l2r_weight": 0.0},
    "fada": {"adversarial_weight": 0.0},
    "mdan": {"mu": 0.0},
    "cmss": {"reversal": 0.0},
    "dmg": {"overlap_weight": 0.0},
    "epi_fcr": {"feature_weight": 0.0, "classifier_weight": 0.0},
    "crossgrad": {"label_share": 0.0},
    "metareg": {"regulariser_rate": 1e-9},
    "feature_critic": {"critic_weight": 0.0},
    "mixstyle": {"probability": 0.0},
    "jigen": {"jigsaw_weight": 0.0},
}
"""Options with which a method's own part of the loss vanishes, or of its network for `recipe`."""
LEARNERS = [
    (name, task)
    for name, entry in ENTRIES.items()
    for task in entry.tasks
    if task in OBJECTIVES and registry.method_class(name).traits.target != "labelled"
]
GO_WITH_EVERY_TASK = [
    name for name, kind in PLUG_INS.items() if "regression" in kind.tasks and name != "stochastic_depth"
]
"""Plug-ins, but for the one that needs residual blocks: such networks are slow."""
CNN: dict[str, object] = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}


def network_of(method: Method) -> dict[str, object]:
    """A small one, for images where the method works on these alone."""
    found = normed_for(method)
    return CNN if found["name"] == "digit_cnn" else found


def domain_of(name: str, number: int, task: str, *, images: bool) -> Domain:
    """Samples that show a hidden number, which the labels follow."""
    draws = np.random.default_rng(sum(name.encode()))
    hidden = draws.normal(size=number)
    noise = draws.normal(0, 0.2, (number, 5))
    inputs = (hidden[:, None] * [1.0, -1.0, 0.5, 0.0, 0.0] + noise).astype(np.float32)
    if images:
        slope = np.linspace(-1, 1, 12)[:, None] * np.ones(12)
        inputs = np.clip(128 + 40 * hidden[:, None, None, None] * slope, 0, 255).astype(np.uint8)
    labels = {
        "regression": 50 + 10 * hidden,
        "multi_label": np.stack([hidden > 0.3, hidden < -0.2, hidden > -1], axis=1),
        "time_to_event": np.stack([np.exp(-hidden), np.arange(number) % 4 != 0], axis=1),
    }[task]
    return Domain(name, inputs, labels.astype(np.float32))


class Run:
    """A run of three sites, and of a target where the method needs one."""

    def __init__(self, method: Method, task: str, network: dict[str, object], rounds: int, played: int) -> None:
        self.images = network["name"] in ("mnist_cnn", "digit_cnn")
        sizes = {"north": 32, "south": 24, "west": 16}
        self.found = [domain_of(name, size, task, images=self.images) for name, size in sizes.items()]
        preprocessing = (IMAGE if self.images else VECTOR).model_copy(update={"objective": OBJECTIVES[task]})
        self.objective: Objective = objective_of(preprocessing)
        lr = (0.02 if self.images else 0.05) * (5 if task == "multi_label" else 1)
        whole = setting(method, self.found, network, momentum=0.9, lr=lr)
        self.setting = replace(whole, preprocessing=preprocessing, classes=3 if task == "multi_label" else 1)
        sites = plans(method, self.found)
        budget = dict.fromkeys([site.name for site in sites], 60 * rounds if method.traits.pooled else 20 * rounds)
        self.method, self.where = method, LocalFederation(sites, self.setting, budget=budget, rounds=rounds)
        built = self.setting.build_network()
        self.state: State = start_run(
            method, self.where, Weights({k: v.contiguous() for k, v in built.state_dict().items()})
        )
        for _ in range(played):
            self.go_on()

    def go_on(self) -> None:
        self.state = step_on(self.method, self.where, self.state)

    def model(self, site: str) -> Network:
        """What predicts at a site: the common model, or the site's own."""
        built = self.method.evaluated_network(self.setting.build_network(), len(self.found))
        own = self.method.traits.keeps and not self.method.traits.pooled
        weights = self.where.own_weights(site, self.state.weights) if own else self.state.weights
        built.load_state_dict(dict(weights))
        return built.eval()

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model says of all sources' samples, and their labels."""
        if self.method.traits.keeps:
            finish_run(self.method, self.where, self.state.weights)
        said = []
        for one in self.found:
            inputs = torch.from_numpy(np.asarray(one.inputs))
            if self.images:
                inputs = (inputs.float() / 255 - 0.5) / 0.25
            with torch.no_grad():
                said.append(self.model(one.name)(inputs))
        return torch.cat(said), torch.from_numpy(np.concatenate([one.labels for one in self.found]))

    def better_than_a_constant(self) -> float:
        """By which part the loss is less than that of the best constant; of concordance, how far above chance."""
        said, labels = self.outputs()
        if self.objective.task == "time_to_event":
            return (concordance(said[:, 0].numpy(), labels.numpy()) or 0) / 100 - 0.5
        best = labels.mean(0).logit() if self.objective.task == "multi_label" else (labels.mean() - 50)[None] / 10
        constant = best.expand(len(labels), -1)
        return 1 - float(self.objective.loss(said, labels) / self.objective.loss(constant, labels))


@pytest.mark.parametrize(
    ("name", "task"), [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in LEARNERS]
)
def test_it_learns_more_than_a_constant(name: str, task: str) -> None:
    """Within twelve rounds: a fifth less loss than the best constant has, or pairs in the right order."""
    method = method_of(name, **OPTIONS.get(name, {}))
    run = Run(method, task, network_of(method), rounds=12, played=0)
    reached: list[float] = []
    while len(reached) < 12 and (not reached or reached[-1] < 0.2):
        run.go_on()
        reached.append(run.better_than_a_constant())
    assert reached[-1] >= 0.2, f"share of the loss that it saves, by round: {reached}; give it options in OPTIONS"


@pytest.mark.parametrize("name", mostly_slow(WITHOUT_ITS_TERM))
def test_what_it_adds_is_at_work(name: str) -> None:
    """Without its own term the same run has other weights."""
    states = []
    for options in ({}, WITHOUT_ITS_TERM[name]):
        method = method_of(name, **(OPTIONS.get(name, {}) | options))
        states.append(Run(method, "regression", network_of(method), rounds=2, played=2).state.weights)
    assert states[0].keys() == states[1].keys()
    assert any(not torch.equal(states[0][key], states[1][key]) for key in states[0])


@functools.cache
def plain_run(task: str) -> Weights:
    return Run(method_of("fedavg"), task, CNN, rounds=1, played=1).state.weights


@pytest.mark.parametrize("name", mostly_slow(GO_WITH_EVERY_TASK, ("mixup", "sharpness")))
def test_a_plug_in_goes_with_every_task(name: str) -> None:
    option: dict[str, Any] = {"name": name, **({"by": {"shift": 0.2}} if name == "augment" else {})}
    for task in OBJECTIVES:
        with_it = Run(method_of("fedavg", local=[option]), task, CNN, rounds=1, played=1).state.weights
        plain = plain_run(task)
        assert all(bool(tensor.isfinite().all()) for tensor in with_it.values())
        assert any(not torch.equal(with_it[key], plain[key]) for key in plain), task


def test_experts_give_the_mean_value() -> None:
    heads = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    features = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    experts = Experts(heads, objective_of(VECTOR.model_copy(update={"objective": OBJECTIVES["regression"]})))
    torch.testing.assert_close(experts(features), (heads[0](features) + heads[1](features)) / 2)


@pytest.mark.parametrize(
    ("name", "options", "word"), [("copa", {"adaptation": True}, "adaptation"), ("fada", {}, "variant")]
)
def test_a_part_that_needs_classes_is_refused(name: str, options: dict[str, Any], word: str) -> None:
    network = models.build(models.parse({"name": "mlp"}), (5,), 1, 0)
    network.objective = objective_of(VECTOR.model_copy(update={"objective": OBJECTIVES["regression"]}))
    with pytest.raises(UserError, match=word):
        method_of(name, **options).check(network)


def test_every_method_that_needs_classes_says_why() -> None:
    needing = {name for name, entry in ENTRIES.items() if entry.tasks == ("classification",)}
    assert needing == {name for name, entry in ENTRIES.items() if entry.needs_classes}


def test_only_methods_for_the_task_are_named() -> None:
    about = cast(Any, SimpleNamespace(data=SimpleNamespace(task="regression", name="prices")))
    with pytest.raises(UserError, match="kd3a is a method for classification") as error:
        method_fits(about, registry.parse({"name": "kd3a"}))
    named = str(error.value).rpartition("choose ")[2].split(", ")
    assert "fedavg" in named
    assert all("regression" in registry.method_class(name).traits.tasks for name in named)
