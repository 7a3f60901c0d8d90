"""A backbone that is frozen for some rounds and then trains: what moves when, what is remembered, who is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny import MLP, domains, federation, run, setting, start_of, step_on, training, vectors
from torch import nn

from fedshift.errors import UserError
from fedshift.experiment.budgets import rounds_needed
from fedshift.experiment.protocols.base import Split
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.setting_json import setting_from, setting_recipe
from fedshift.federation.site import Envelope
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.pooled.masf import MASF
from fedshift.models.network import Network, freeze_backbone, with_thawing
from fedshift.models.registry import any_code
from fedshift.weights import Weights

NET: dict[str, object] = {"name": f"{__file__}:normed"}
FOUND = [vectors("large", 21), vectors("small", 10)]


def normed(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of a user's own, whose first layer is fixed for good."""
    first = nn.Linear(input_shape[0], 6).requires_grad_(False)
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, classes))


def same(a: Weights, b: Weights, part: str) -> set[bool]:
    """Whether the tensors of a part of two models are equal, without those that are fixed for good."""
    names = [name for name in a if name.startswith(part) and not name.startswith("features.0.")]
    return {torch.equal(a[name], b[name]) for name in names}


@pytest.mark.parametrize("method", [FedAvg(), FedProx(proximal_weight=1.0)], ids=["fedavg", "fedprox"])
def test_the_backbone_moves_after_so_many_rounds_and_not_before(method: FedAvg) -> None:
    start = start_of(method, FOUND, NET)
    frozen, thawed = (run(method, FOUND, NET, rounds=n, thaw_after=1)[0].weights for n in (1, 2))
    assert same(frozen, start, "features") == {True}, "weights and BatchNorm's statistics"
    assert same(frozen, start, "classifier") == {False}
    assert same(thawed, frozen, "features") == {False}
    assert torch.equal(thawed["features.0.weight"], start["features.0.weight"]), "what was fixed stays fixed"
    assert same(frozen, run(method, FOUND, NET, rounds=1)[0].weights, "features") == {False}


@pytest.mark.parametrize("rates", [{}, {"features": 0.1}], ids=["one rate", "layer rates"])
def test_momentum_goes_on_over_the_boundary_and_through_files(rates: dict[str, float], tmp_path: Path) -> None:
    options = {"momentum": 0.9, "reset_optimizer_each_round": False, "layer_rates": rates, "thaw_after": 1}
    whole = run(FedAvg(), FOUND, NET, rounds=2, **options)[0].weights
    state, first = run(FedAvg(), FOUND, NET, rounds=1, **options)
    second = federation(FedAvg(), FOUND, NET, **options)
    second.load_memory(tmp_path, first.save_memory(tmp_path))
    second.progress, second.round = first.progress, first.round
    resumed = step_on(second.method, second, State(state.weights, round=1)).weights
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    anew = run(FedAvg(), FOUND, NET, rounds=2, **{**options, "reset_optimizer_each_round": True})[0].weights
    assert same(anew, whole, "classifier") == {False}
    assert isinstance(first, LocalFederation)
    site = first._runners["large"].site
    site.begin(Envelope(2, 2, 0.5, 9))
    model = site.model(state.weights)
    found = site.optimizer(model, memory="optimizer").state
    speeds = {name: found[value]["momentum_buffer"] for name, value in model.named_parameters() if value in found}
    moving = {name for name, speed in speeds.items() if speed.any()}
    assert moving == {"classifier.weight", "classifier.bias"}
    assert all(speed.shape == model.get_parameter(name).shape for name, speed in speeds.items())


def test_a_network_thaws_to_what_it_was_also_in_another_process() -> None:
    there = setting_from(setting_recipe(setting(FedAvg(), FOUND, NET, thaw_after=1)), any_code).build_network()
    plain = setting(FedAvg(), FOUND, NET).build_network()
    freeze_backbone(there, True)
    frozen = copy.deepcopy(there).train()
    assert [name for name, value in frozen.named_parameters() if value.requires_grad] == [
        "classifier.weight",
        "classifier.bias",
    ]
    assert not frozen.features[1].training
    freeze_backbone(frozen, False)
    assert [type(module) for module in frozen.modules()] == [type(module) for module in plain.modules()]
    for mine, theirs in zip(frozen.train().parameters(), plain.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad
    assert frozen.features[1].training


def test_without_it_settings_are_those_of_before() -> None:
    assert "thaw_after" not in training(thaw_after=0).model_dump()
    assert training(thaw_after=1).model_dump()["thaw_after"] == 1


def test_what_cannot_thaw_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.thaw_after: the network has no backbone"):
        setting(FedAvg(), domains(MLP), MLP, thaw_after=1).build_network()
    for wrong in ({"thaw_after": 2, "rounds": 2}, {"thaw_after": 1, "adapters": {}}):
        with pytest.raises(ValidationError, match="thaw_after"):
            training(**wrong)
    split = Split({"here": np.arange(16)}, {}, {})
    for method, said in ((FedAvg(), "fedavg has 1 rounds"), (MASF(), "masf needs gradients")):
        with pytest.raises(UserError, match=rf"thaw_after: {said}"):
            rounds_needed(method, training(rounds=3, thaw_after=1), split, {"here": 2})


def test_a_backbone_of_one_layer_is_frozen_too() -> None:
    parts = nn.Linear(3, 4), nn.Linear(4, 2)
    network = Network(*parts, embedding_size=4, classes=2, stages={}, alignment_stages=())
    network.backbone = "features"
    freeze_backbone(with_thawing(network), True)
    assert {name for name, value in network.named_parameters() if value.requires_grad} == {
        "classifier.weight",
        "classifier.bias",
    }
    freeze_backbone(network, False)
    assert all(value.requires_grad for value in network.parameters())
