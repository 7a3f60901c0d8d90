"""Layers with learning rates of their own: which parameters, how far they move, who remembers and who refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_site import cross_entropy, exchanges, site_of
from tiny import CNN, MLP, domains, plans, setting, vectors
from torch import nn

from fedshift.errors import UserError
from fedshift.federation.setting_json import setting_from, setting_recipe
from fedshift.federation.site import Envelope
from fedshift.federation.site_runner import SiteRunner
from fedshift.federation.training import set_learning_rate
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fednova import FedNova
from fedshift.methods.federated.scaffold import Scaffold, zeros
from fedshift.methods.federated.shot import SHOT
from fedshift.models.network import Network, rate_factors, with_layer_rates
from fedshift.weights import Weights

RATES = {"features": 0.1, "conv2": 0.25}
EXPECTED = {"features.conv1.0": 0.1, "features.conv2.0": 0.25, "features.hidden.0": 0.1, "classifier": 1.0}


def moved(network: dict[str, object] = CNN, **options: Any) -> Weights:
    """How far one step of plain SGD takes every parameter."""
    site = site_of(8, network, **{"batch_size": 8, "lr": 0.1, "momentum": 0.0, **options})
    model = site.model()
    before = site.weights_of(model)
    site.minimise(cross_entropy(model), model)
    after = site.weights_of(model)
    return Weights({name: after[name] - before[name] for name in before})


def staged() -> Network:
    """Five layers, of which the stages ``low`` and ``high`` are two each; the last belongs to none."""
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    stages = {"low": "features.1", "high": "features.3"}
    return Network(layers, nn.Linear(2, 2), embedding_size=2, classes=2, stages=stages, alignment_stages=())


def factors_of(network: Network) -> dict[str, float]:
    found = rate_factors([network])
    return {
        name.removesuffix(".weight"): found[value] for name, value in network.named_parameters() if "bias" not in name
    }


def test_a_step_moves_each_layer_by_its_own_rate() -> None:
    plain, found = moved(), moved(layer_rates=RATES)
    for name in plain:
        factor = next(value for layer, value in EXPECTED.items() if name.startswith(layer))
        assert plain[name].abs().max() > 1e-5, name
        assert torch.allclose(found[name], factor * plain[name], rtol=1e-2, atol=1e-7), name


def test_a_stage_is_what_comes_after_the_one_before_and_what_names_fewer_layers_counts() -> None:
    found = factors_of(with_layer_rates(staged(), {"features.2": 4.0, "features": 0.5, "high": 3.0}))
    assert list(found.values()) == [0.5, 0.5, 4.0, 3.0, 0.5, 1.0]
    found = factors_of(with_layer_rates(staged(), {"low": 2.0, "high": 3.0}))
    assert list(found.values()) == [2.0, 2.0, 3.0, 3.0, 1.0, 1.0]


def test_the_rates_of_layers_follow_the_schedule_and_what_a_method_sets() -> None:
    site = site_of(16, lr=0.1, lr_schedule="linear", lr_step="mini_batch", batch_size=8, layer_rates={"features": 0.5})
    site.begin(Envelope(2, 1, 0.0, 4))
    optimizer = site.optimizer(site.model())
    rates = [[group["lr"] for group in optimizer.param_groups] for _ in site.batches(2)]
    assert rates == [pytest.approx([0.5 * rate, rate]) for rate in (0.1, 0.075, 0.05, 0.025)]
    set_learning_rate(optimizer, 0.8)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.8]


def test_a_methods_own_rate_of_the_backbone_is_multiplied() -> None:
    method, found = SHOT(backbone_rate=0.1, decay=False), [vectors("here", 16)]
    options = setting(method, found, MLP, lr=0.2, layer_rates={"features": 0.5})
    site = SiteRunner(plans(method, found)[0], options).site
    site.begin(Envelope(1, 1, 0.0, 10))
    optimizer, set_rates = method._optimizer(site, site.model())
    for _ in range(2):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.01])
        set_rates()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_momentum_goes_on_through_files(name: str, tmp_path: Path) -> None:
    options = {
        "optimizer": name,
        "momentum": 0.9,
        "reset_optimizer_each_round": False,
        "layer_rates": {"classifier": 3},
    }
    found, _ = exchanges(site_of(21, MLP, **options), 3)
    assert exchanges(site_of(21, MLP, **options), 3, through=tmp_path)[0] == found
    assert exchanges(site_of(21, MLP, **{**options, "layer_rates": {}}), 3)[0] != found


def test_another_process_has_the_same_rates() -> None:
    there = setting_from(setting_recipe(setting(FedAvg(), domains(), CNN, layer_rates=RATES)))
    assert factors_of(there.build_network()) == EXPECTED


def test_a_name_of_no_trained_layer_is_refused() -> None:
    network = staged()
    network.features[4].requires_grad_(False)
    for wrong, near in (("feature", "features"), ("hihg", "high"), ("features.4", "features.3"), ("features.", "feat")):
        with pytest.raises(UserError, match=rf"training\.layer_rates.*'{wrong}'.*{near}"):
            with_layer_rates(network, {wrong: 0.5})


def test_equations_of_one_rate_refuse_several() -> None:
    site = site_of(8, layer_rates={"features": 0.5})
    weights = site.weights_of(site.model())
    for call in (
        lambda: Scaffold().train(site, weights, Weights(zeros(weights))),
        lambda: FedNova(proximal_weight=0.1).train(site, weights),
    ):
        with pytest.raises(UserError, match=r"training\.layer_rates"):
            call()
    assert FedNova().train(site, weights).samples == 8
