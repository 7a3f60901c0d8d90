"""Single steps of federated methods: the numbers of the authors' own functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from authors_numbers import references
from torch import Tensor, nn

from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.control_variates import dynamic_penalty, moved_gradient
from fedshift.functional.gradient_matching import matching_shares
from fedshift.functional.sharpness import worst_nearby
from fedshift.methods.federated.feddyn import clipped_but_decay
from fedshift.methods.server import OPTIMIZERS
from fedshift.models.normalisation import AssembledNorm2d
from fedshift.weights import Weights

REFERENCES = references("federated")


@pytest.mark.parametrize("entry", ["csac_3", "csac_4"])
def test_csac_s_attention_between_layers(entry: str) -> None:
    reference = REFERENCES[entry]
    fused, local = (torch.stack([reference.tensors[f"{side}{i}"] for i in range(3)]) for side in ("fused", "local"))
    queries, keys = fused, local
    if "query0.weight" in reference.tensors:
        queries, keys = (
            torch.stack(
                [
                    F.conv2d(maps[i], reference.tensors[f"{name}{i}.weight"], reference.tensors[f"{name}{i}.bias"])
                    for i in range(3)
                ]
            )
            for maps, name in ((fused, "query"), (local, "key"))
        )
    for name, kinds in (("alpha", (True, True)), ("position", (True, False)), ("channel", (False, True))):
        reference.agree(name, cross_layer_attention(fused, local, *kinds, queries=queries, keys=keys))


def test_gperxan_s_normalisation() -> None:
    reference = REFERENCES["gperxan_1"]
    norm = AssembledNorm2d(nn.BatchNorm2d(2)).double()
    outputs = norm(reference.tensors["x"])
    reference.agree("train", outputs)
    outputs.backward(reference.tensors["upstream gradient"])
    gradients = {name: value.grad for name, value in norm.named_parameters()}
    reference.agree("score_gradients", torch.stack([gradients["score_batchnorm"], gradients["score_instancenorm"]]))
    reference.agree("batchnorm_weight_gradient", gradients["batchnorm.weight"])
    reference.agree("instancenorm_weight_gradient", gradients["instancenorm.weight"])
    reference.agree("running_mean", norm.batchnorm.running_mean)
    reference.agree("running_var", norm.batchnorm.running_var)
    reference.agree("evaluation", norm.eval()(reference.tensors["x"]))
    assert sorted(gradients) == reference.outputs["parameters"]


@pytest.mark.parametrize("entry", ["fedsam_1", "fedasam_1"])
def test_where_the_loss_is_worst_nearby(entry: str) -> None:
    reference = REFERENCES[entry]
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double().train()
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(reference.tensors[name])
    loss = F.cross_entropy(network(reference.tensors["x"]), torch.tensor(reference.inputs["labels"]))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    options: dict[str, Any] = {"adaptive": entry == "fedasam_1", "eta": reference.parameters["eta"], "biases": False}
    there = worst_nearby(parameters, gradients, reference.parameters["rho"], **options)
    for name, theirs in reference.outputs["perturbation"].items():
        moved = (there[name] - parameters[name]).detach()
        torch.testing.assert_close(moved, torch.tensor(theirs, dtype=torch.float64), atol=reference.tolerance, rtol=0)


def test_fedomg_s_step_as_released() -> None:
    """The code descends 20 steps of SGD for Γ, so its direction is 3e-4 from the minimum."""
    reference = REFERENCES["fedomg_4"]
    updates = torch.stack(
        [
            torch.cat([reference.tensors[f"update{k} of weight"].flatten(), reference.tensors[f"update{k} of bias"]])
            for k in range(3)
        ]
    )
    kappa, rate = reference.parameters["c"], reference.parameters["global_lr"]
    ours = rate / (1 + kappa**2) / 3 * (matching_shares(updates @ updates.T, kappa) @ updates)
    theirs = torch.tensor(reference.outputs["step"], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


SERVERS: Mapping[str, tuple[dict[str, Any], bool]] = {
    "server_adagrad_1": ({"optimizer": "adagrad"}, True),
    "server_yogi_1": ({"optimizer": "yogi"}, True),
    "server_momentum_1": ({"optimizer": "momentum"}, False),
}


@pytest.mark.parametrize("entry", SERVERS)
def test_the_server_s_steps(entry: str) -> None:
    """Flower begins v at 0 where the paper has τ²: that start is put in. FedAdam's correction is not ours."""
    reference = REFERENCES[entry]
    options, from_zero = SERVERS[entry]
    rates = {"rate": reference.parameters["eta"], "tau": reference.parameters["tau"]} if from_zero else {}
    made = OPTIMIZERS[options["optimizer"]](**options, **rates)
    index = torch.arange(5, dtype=torch.float64)
    weight = Weights({"x": torch.cos(0.5 * index)})
    zero = Weights({"x": torch.zeros(5, dtype=torch.float64)})
    moments: Mapping[str, Weights] = {"first": zero, "second": zero} if from_zero else {}
    shares = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64) / 60
    for number in (1, 2):
        models = torch.stack([torch.sin(0.9 * index + 1.3 * k + 2.1 * number) for k in range(3)])
        change = Weights({"x": shares @ models - weight["x"]})
        weight, moments = made.step(weight, change, moments)
        theirs: Tensor = torch.tensor(reference.outputs["models"][number - 1], dtype=torch.float64)
        torch.testing.assert_close(weight["x"], theirs, atol=reference.tolerance, rtol=0)
    assert copy.deepcopy(made) == made


@pytest.mark.parametrize("entry", ["feddyn_1", "feddyn_2", "feddyn_3"])
def test_feddyn_s_rounds_with_clipped_gradients_and_alphas_by_samples(entry: str) -> None:
    """A site's steps down CE − ⟨h_i, θ⟩ + α_i/2·‖θ − θ_t‖², clipped at 10 but for the decay; two rounds of three sites.

    The third entry has gradients far above 10.
    """
    reference = REFERENCES[entry]
    options = reference.parameters
    samples = torch.tensor(options["samples"], dtype=torch.float64)
    alphas = (options["alpha"] * samples.mean() / samples).tolist()
    common = {name: reference.tensors[name].clone() for name in ("weight", "bias")}
    own = [{name: torch.zeros_like(value) for name, value in common.items()} for _ in alphas]
    for number in range(options["rounds"]):
        models = []
        for k, alpha in enumerate(alphas):
            model = {name: value.clone().requires_grad_(True) for name, value in common.items()}
            labels = torch.tensor(reference.inputs[f"labels{k}"])
            for _ in range(options["epochs"]):
                scores = F.linear(reference.tensors[f"x{k}"], model["weight"], model["bias"])
                whole = F.cross_entropy(scores, labels) + dynamic_penalty(model, own[k], common, alpha)
                clipped_but_decay(whole, model, alpha, options["max_norm"]).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for value in model.values():
                        value -= options["lr"] * value.grad  # type: ignore[operator]
                        value.grad = None
            models.append({name: value.detach() for name, value in model.items()})
            own[k] = moved_gradient(own[k], common, models[k], alpha)
        drifts = [{name: -own[k][name] / alpha for name in common} for k, alpha in enumerate(alphas)]
        common = {
            name: torch.stack([models[k][name] + drifts[k][name] for k in range(len(alphas))]).mean(0)
            for name in common
        }
        for name, theirs in reference.outputs["models"][number].items():
            expected = torch.tensor(theirs, dtype=torch.float64)
            torch.testing.assert_close(common[name], expected, atol=reference.tolerance, rtol=0)
