"""`compile`, fp16 and `loader_workers` of ``training`` in whole experiments: what they change, and what not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import Cli
from safetensors.torch import load_file
from small import experiment, images, save, sites, write

import fedshift
from fedshift.data.domain import Domain, Preprocessing
from fedshift.data.site_data import SiteData
from fedshift.federation.training import Training
from fedshift.models import products
from fedshift.models import registry as models

CNN = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's compiler up to the code that it would make: the same graphs, run by torch. It needs no C++ compiler."""
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **options: whole(*given, backend="aot_eager", **options))
    products._compile.cache_clear()
    torch.compiler.reset()
    yield
    products._compile.cache_clear()
    torch.compiler.reset()


def trained(where: dict[str, str], folder: Path, **training: Any) -> dict[str, torch.Tensor]:
    whole = experiment(where, model=CNN, methods=[{"name": "fedavg"}])
    fedshift.run(whole | {"training": {**whole["training"], **training}}, folder)
    (file,) = folder.rglob("model.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_a_compiled_network_is_the_network(traced: None) -> None:
    """Copies share what was compiled; evaluation and names of weights are as before; each batch size once."""
    plain = models.build(models.parse(CNN), (1, 12, 12), 3, 0)
    fast = products.with_compiler(models.build(models.parse(CNN), (1, 12, 12), 3, 0))
    assert list(fast.state_dict()) == list(plain.state_dict())
    counted = torch._dynamo.utils.counters
    counted.clear()
    for size in (6, 5, 6, 5):
        inputs = torch.rand(size, 1, 12, 12)
        for network in (plain, fast):
            network.zero_grad()
            network.train()(inputs).square().sum().backward()
        for own, other in zip(fast.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
    seen = counted["stats"]["unique_graphs"]
    assert seen == 4, "features and classifier for two sizes"
    fast.eval()(torch.rand(3, 1, 12, 12))
    assert counted["stats"]["unique_graphs"] == seen
    assert not counted["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(not products.can_compile("cpu"), reason="no C++ compiler")
def test_a_compiled_run_is_another_run_with_almost_the_same_model(traced: None, cli: Cli, tmp_path: Path) -> None:
    where = save(tmp_path, a=images(1), b=images(2), c=images(3, 33))
    plain, fast = (trained(where, tmp_path / str(on), compile=on) for on in (False, True))
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-4, atol=1e-5)
    file = write(tmp_path / "e.yaml", experiment(where, model=CNN))
    assert "training.compile" in cli("run", file, "--runs", tmp_path / "True").error()


@pytest.mark.slow
@pytest.mark.skipif(not products.can_compile("cpu"), reason="no C++ compiler")
def test_compiled_code(tmp_path: Path) -> None:
    layer = torch.nn.Linear(5, 3)
    fast = products.with_compiler(torch.nn.Linear(5, 3))
    fast.load_state_dict(layer.state_dict())
    inputs = torch.rand(4, 5)
    try:
        made = fast(inputs)
    except RuntimeError as error:
        pytest.skip(f"the compiler does not work here: {str(error).splitlines()[0]}")
    torch.testing.assert_close(made, layer(inputs))


def test_no_compiler(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    assert "g++" in cli("check", file, "training.compile=true").error()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["training.precision=fp16", "methods.0.name=fediir"], ["fp16", "fediir"]),
        (["training.compile=true", "methods.0.name=fediir"], ["compile", "fediir"]),
        (["training.precision=fp16", "methods.0.local=[mixup]"], ["fp16", "plug-ins"]),
        (["training.precision=fp16", "training.privacy={epsilon: 3}"], ["fp16", "privacy"]),
        (["training.compile=true", "training.privacy={epsilon: 3}"], ["compile", "privacy"]),
        (["training.precision=fp16", "training.matrix_products=onednn"], ["fp16", "onednn"]),
        (["training.compile=true", "engine.sites=side_by_side", "model.name=mlp"], ["compile", "side_by_side"]),
        (["training.loader_workers=-1"], ["loader_workers"]),
    ],
)
def test_what_does_not_go_together(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], words: list[str]
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a machine without a compiler says that first
    file = write(tmp_path / "e.yaml", experiment(sites(tmp_path)))
    said = cli("check", file, *changes).error()
    assert all(word in said for word in words), said


def test_samples_that_are_read_ahead_are_the_same(cli: Cli, tmp_path: Path) -> None:
    """No bit and no run depends on it: a folder made without it is finished with it."""
    where = save(tmp_path, a=images(1), b=images(2), c=images(3, 33))
    options = {"augmentation": {"shift": 0.1, "flip": 0.5}}
    plain, ahead = (trained(where, tmp_path / str(n), loader_workers=n, **options) for n in (0, 3))
    assert all(torch.equal(plain[name], ahead[name]) for name in plain)
    whole = experiment(where, model=CNN, training={"rounds": 2, "batch_size": 8, "lr": 0.05, **options})
    file = write(tmp_path / "e.yaml", whole)
    assert cli("run", file, "training.loader_workers=5", "--runs", tmp_path / "0").code == 0
    assert "loader_workers" not in Training().model_dump()


def test_reading_ahead_stops_with_the_loop() -> None:
    """Rows come in their order, each with its own samples; a loop that ends early leaves no thread."""
    pixels = np.arange(40, dtype=np.uint8)[:, None, None, None].repeat(16, 2).repeat(16, 3)
    domain = Domain("a", pixels, np.zeros(40, dtype=np.int64))
    data = SiteData([(domain, np.arange(40), 0)], Preprocessing(kind="image", channels=1, size=16), cache_bytes=0)
    orders = list(torch.arange(40).split(7))
    for rows, expected in zip(data.read_ahead(orders, 2), orders, strict=True):
        assert rows is expected
        assert torch.equal((data.stored_rows(rows)[:, 0, 0, 0] * 255).round().long(), rows)
    some = data.read_ahead(orders, 2)
    next(some)
    some.close()
    assert torch.equal((data.stored_rows(orders[3])[:, 0, 0, 0] * 255).round().long(), orders[3])
