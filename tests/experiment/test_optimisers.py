"""``optimizer: adamw``, ``accumulate`` and ``steps`` of ``training``, beside torch's own and counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import Cli
from safetensors.torch import load_file
from small import experiment, features, save, sites, write
from torch import nn

import fedshift
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan
from fedshift.federation.training import Training
from fedshift.methods.pooled.equal_steps import steps_of_run
from tried import slow


def model_of(options: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    fedshift.run(options, folder)
    (file,) = folder.rglob("model.safetensors")
    return load_file(file)


def trained(where: dict[str, str], folder: Path, name: str, **training: Any) -> dict[str, torch.Tensor]:
    whole = experiment(where, methods=[{"name": name}])
    return model_of(whole | {"training": {**whole["training"], **training}}, folder)


def test_adamw_is_torch_s(tmp_path: Path) -> None:
    """A rate of the weight decay alone, by Loshchilov & Hutter: w ← (1 - ηλ) w, apart from Adam's step."""
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = Training(optimizer="adamw", lr=0.1, weight_decay=0.5).build_optimizer(layer.parameters(), 0.1)
    assert type(optimizer) is torch.optim.AdamW
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), 0.95 * before)
    where = sites(tmp_path)
    decayed, plain = (
        trained(where, tmp_path / kind, "fedavg", optimizer=kind, weight_decay=0.5) for kind in ("adamw", "adam")
    )
    assert any(not torch.equal(decayed[key], plain[key]) for key in plain)


@pytest.mark.parametrize("name", ["fedavg", *map(slow, ["fedprox", "scaffold", "deepall"])])
@pytest.mark.parametrize("parts", [2, 3, 100])
def test_accumulated_gradients_are_those_of_the_whole_mini_batch(tmp_path: Path, name: str, parts: int) -> None:
    where = sites(tmp_path)
    whole, divided = (trained(where, tmp_path / f"{k}", name, rounds=3, accumulate=k) for k in (1, parts))
    for key in whole:
        torch.testing.assert_close(divided[key], whole[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "mini_batches"),
    [
        ({"name": "deepall"}, 60),
        ({"name": "deepall", "domain_batches": "full"}, 180),
        ({"name": "deepall", "domain_batches": "split"}, 60),
    ],
)
def test_sixty_pooled_steps_are_sixty(tmp_path: Path, method: dict[str, Any], mini_batches: int) -> None:
    """Sites of different size, so that shares are no whole numbers."""
    sizes = {"a": 30, "b": 24, "c": 33, "d": 61}
    where = save(tmp_path, **{site: features(n, size) for n, (site, size) in enumerate(sizes.items())})
    whole = parse(experiment(where, methods=[method], training={"steps": 60, "batch_size": 8}))
    (planned,) = Plan(whole, build_data(whole)).runs
    assert sum(planned.budget.values()) == mini_batches
    assert steps_of_run(planned.run.method, planned.budget) == 60


def test_steps_of_sites_are_of_each_and_beside_mini_batches_refused(tmp_path: Path, cli: Cli) -> None:
    where = sites(tmp_path)
    whole = experiment(where, training={"rounds": 2, "batch_size": 8, "steps": 12})
    whole["methods"] = [{"name": "fedavg", "steps_per_round": 4}, {"name": "deepall", "training": {"mini_batches": 5}}]
    parsed = parse(whole)
    federated, pooled = Plan(parsed, build_data(parsed)).runs
    assert set(federated.budget.values()) == {12}
    assert federated.rounds == 3
    assert np.mean(list(pooled.budget.values())) == pytest.approx(5, abs=0.5)
    whole["training"]["mini_batches"] = 3
    assert "steps and mini_batches both" in cli("check", write(tmp_path / "e.yaml", whole)).error()


@pytest.mark.parametrize("name", ["fedadg", "masf"])
def test_what_cannot_be_divided_is_refused(tmp_path: Path, cli: Cli, name: str) -> None:
    whole = experiment(sites(tmp_path), methods=[{"name": name}])
    whole["training"]["accumulate"] = 2
    told = cli("run", write(tmp_path / "e.yaml", whole), "--runs", tmp_path / "runs").error()
    assert "training.accumulate" in told
