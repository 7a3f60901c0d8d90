"""Adapters: what trains, what travels, and that the model which is written has them merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import Cli
from safetensors.torch import load_file
from small import Stop, StopAfter, experiment, images, outcome, sites, write
from torch import Tensor, nn

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse as parse_experiment
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.training import Training
from fedshift.models import registry as models
from fedshift.models.adapters import Adapters, check_adapters, merge_adapters, with_adapters
from fedshift.models.network import Network
from fedshift.models.own.own_network import network_of_object
from fedshift.weights import Weights

pytestmark = pytest.mark.slow  # the import of peft takes seconds
RANK = 2


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.first, self.head = nn.Linear(input_shape[0], 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.first(x).relu())
"""


@pytest.fixture(scope="module", autouse=True)
def _with_peft() -> None:
    """Imported by the one process that runs these tests, and not by each that collects them."""
    pytest.importorskip("peft")


class Volumes(nn.Module):
    """Convolutions of several kinds, normalisation and a bare parameter."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv3d(input_shape[0], 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU())
        self.apart = nn.Conv3d(4, 4, 3, padding=1, groups=4)
        self.late = nn.Conv3d(4, 6, 1, bias=False)
        self.shift = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, classes)

    def forward(self, volumes: Tensor) -> Tensor:
        found: Tensor = self.head(self.late(self.apart(self.early(volumes))).mean((2, 3, 4)) + self.shift)
        return found


class Attentive(nn.Module):
    """Attention uses the weights of its last layer without calling the layer, and in evaluation those of others."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(input_shape[0], 2, 8, batch_first=True)
        self.head = nn.Linear(input_shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(x[:, None])[:, 0])
        return found


def built(model: Any, shape: tuple[int, ...], **options: Any) -> Network:
    parsed = models.parse(model) if isinstance(model, dict) else network_of_object(model)
    return with_adapters(models.build(parsed, shape, 3, 0), Adapters(rank=RANK, **options), shape, 0)


NETWORKS = [({"name": "mnist_cnn"}, (1, 12, 12)), ({"name": "mlp", "hidden": [8, 4]}, (5,)), (Volumes, (2, 4, 4, 4))]


@pytest.mark.parametrize(("model", "shape"), NETWORKS)
@pytest.mark.parametrize("second_only", [False, True])
def test_only_adapters_and_head_train_and_merging_changes_no_score(
    model: Any, shape: tuple[int, ...], second_only: bool
) -> None:
    parsed = models.parse(model) if isinstance(model, dict) else network_of_object(model)
    plain = models.build(parsed, shape, 3, 0).eval()
    adapted = built(model, shape, second_only=second_only)
    assert {name.rpartition(".lora_")[0] for name in adapted.state_dict() if "lora_" in name} == {
        path
        for path, module in plain.features.named_modules(prefix="features")
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d) and getattr(module, "groups", 1) == 1
    }
    others = [name for name in adapted.state_dict() if "lora_" not in name]
    assert others == [f"classifier.{name}" for name in plain.classifier.state_dict()]
    assert any("lora_A" in name for name in adapted.state_dict()) != second_only
    assert {name for name, value in adapted.named_parameters() if value.requires_grad} == set(adapted.state_dict())

    samples = torch.rand(6, *shape)
    fixed = {name: tensor.clone() for name, tensor in adapted.named_buffers()}
    adapted.eval()
    assert torch.equal(adapted(samples), plain(samples)), "at first an adapter adds nothing"
    adapted.train()
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(samples).square().sum().sqrt().backward()
        optimizer.step()
    assert all(torch.equal(tensor, fixed[name]) for name, tensor in adapted.named_buffers())
    found = merge_adapters(adapted, Weights(adapted.state_dict()))
    before = plain(samples)
    plain.load_state_dict(dict(found))
    after = adapted.eval()(samples)
    assert torch.allclose(plain(samples), after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_where_adapters_are() -> None:
    norms = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    adapted = built(Volumes, (2, 4, 4, 4), normalisation=True)
    assert {f"features.early.1.{name}" for name in norms} <= set(adapted.state_dict())
    norm = adapted.get_submodule("features.early.1")
    adapted.train()(torch.rand(3, 2, 4, 4, 4)).sum().backward()
    assert not torch.equal(norm.get_buffer("running_mean"), torch.zeros(4))
    assert norm.get_parameter("weight").grad is not None
    adapted = built(Volumes, (2, 4, 4, 4), targets=["early.0"])
    assert {name.split(".lora_")[0] for name in adapted.state_dict() if "lora_" in name} == {"features.early.0"}
    adapted = built(Attentive, (6,))
    assert not any("out_proj" in name for name in adapted.state_dict())
    with pytest.raises(UserError, match="without calling"):
        check_adapters(adapted, (6,))
    check_adapters(built({"name": "mnist_cnn"}, (1, 12, 12)), (1, 12, 12))


@pytest.mark.parametrize(
    ("model", "shape", "options", "said"),
    [
        ({"name": "linear"}, (5,), {}, "no linear or convolution layer"),
        ({"name": "mlp"}, (5,), {"targets": ["hiden"]}, "called 'hiden'"),
        (Volumes, (2, 4, 4, 4), {"targets": ["apart"]}, "called 'apart'"),
        (nn.Sequential(nn.Linear(5, 3), nn.Softplus()), (5,), {}, "last layer"),
    ],
)
def test_what_cannot_have_adapters_is_refused(model: Any, shape: tuple[int, ...], options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        built(model, shape, **options)


def cnn(folder: Path, method: Any = "fedavg", **training: Any) -> dict[str, Any]:
    options = {"rounds": 2, "batch_size": 8, "lr": 0.05, "adapters": {"rank": RANK}, **training}
    return experiment(sites(folder / "data", images), model={"name": "mnist_cnn"}, methods=[method], training=options)


CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}


@pytest.mark.parametrize("method", ["fedavg", {"name": "fedprox"}, CSAC])
def test_a_run_sends_adapters_and_head_and_writes_a_merged_model(method: Any, tmp_path: Path) -> None:
    options = cnn(tmp_path, method)
    found = fedshift.run(options, tmp_path / "runs")
    (run,) = found.collected.runs
    training, network = Training(adapters=Adapters(rank=RANK)), models.parse({"name": "mnist_cnn"})
    adapted = training.network(network, (1, 12, 12), 3, 0)
    size = sum(tensor.numel() * 4 for tensor in adapted.state_dict().values())
    uploads = run.result.rounds + (method == CSAC)
    assert run.result.bytes_up["weights"] == 2 * uploads * size
    checked = fedshift.check(options)
    assert checked.payload == size
    assert any("drawn at random" in warning for warning in checked.warnings)
    plain = models.build(network, (1, 12, 12), 3, 0).state_dict()
    written = load_file(run.folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {name: t.shape for name, t in plain.items()}
    changed = {name for name in plain if not torch.equal(plain[name], written[name])}
    assert changed == {name for name in plain if name.endswith("weight") or name.startswith("classifier")}
    data = np.load(options["data"]["sites"]["a"])
    right = 100 * np.mean(found.predict(data["x"]) == data["y"].astype(str))
    assert right == pytest.approx(run.result.accuracy())
    card = fedshift.Model.load(run.folder).card()
    assert f"{sum(t.numel() for t in plain.values()):,} parameters" in card


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options = parse_experiment(cnn(tmp_path, momentum=0.9, reset_optimizer_each_round=False))
    run_experiment(options, tmp_path / "whole")
    with pytest.raises(Stop):
        run_experiment(options, tmp_path / "killed", StopAfter(1))
    run_experiment(options, tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_a_method_that_changes_fixed_layers_says_so(tmp_path: Path) -> None:
    options = cnn(tmp_path, "fedbn") | {"model": {"name": "digit_cnn"}}
    for method, said in (("fedbn", "normalisation: true"), ("copa", "normalisation: true")):
        with pytest.raises(UserError, match=said):
            fedshift.check(options | {"methods": [method]})


def test_an_estimator_with_adapters_predicts_as_it_trained(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = rng.normal(size=(40, 4)) + 2.0 * y[:, None]
    model = {"name": "mlp", "hidden": [16]}
    estimator = fedshift.FederatedClassifier(model=model, rounds=10, training={"adapters": {"rank": RANK}}).fit(x, y)
    assert estimator.score(x, y) > 0.8
    whole = 4 * sum(tensor.numel() for tensor in estimator.model_.trained.network.state_dict().values())
    assert estimator.bytes_up_["weights"] < 10 * whole
    estimator.model_.save(tmp_path / "m.safetensors")
    found = fedshift.Model.load(tmp_path / "m.safetensors").predict_proba(x)
    assert np.array_equal(found, estimator.predict_proba(x))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"adapters": {"targets": ["frist"]}}}, "'first'"),
        ({"model": "linear", "training": {"adapters": {}}}, "no linear or convolution"),
        ({"training": {"adapters": {}}, "methods": ["fedbn"]}, "fedbn needs"),
    ],
    ids=["a target that is not there", "a network of its head alone", "no BatchNorm that trains"],
)
def test_what_does_not_fit_is_one_line(changes: dict[str, Any], said: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path), model={"name": "net.py:Net"}) | changes)
    assert said in cli("run", file, "--runs", tmp_path / "runs").error()
    assert not (tmp_path / "runs").exists(), "nothing is written"
