"""Experiments with a network of the user's own: runs, records, resumption, prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from small import experiment, features, save, sites

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.predict import load_model
from fedshift.import_paths import import_file

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, input_shape, classes, width=6):
        super().__init__(nn.Flatten(), nn.LazyLinear(width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1),
                         nn.Linear(width, classes))
"""


def own(folder: Path, data: dict[str, str], text: str = NET, **changes: Any) -> dict[str, Any]:
    (folder / "own.py").write_text(text)
    return experiment(data, model={"name": f"{folder}/own.py:Net"}, **changes)


def test_a_run_records_the_network_and_predicts_with_it(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(own(tmp_path, sites(tmp_path / "data")) | {"model": "own.py:Net"}))
    found = fedshift.run(file, tmp_path / "runs")
    (run,) = (tmp_path / "runs").glob("**/seed-0")
    record = yaml.safe_load((run / "experiment.yaml").read_text())["model"]
    assert record["name"] == "own.py:Net", "no path of this machine"
    assert str(tmp_path) not in str(load_model(run, own_network=f"{file.parent}/own.py:Net").metadata["model"])

    x = features(1)
    np.savez(tmp_path / "x.npz", **x)
    trained = load_model(run, own_network=f"{file.parent}/own.py:Net")
    assert len(trained.predict(tmp_path / "x.npz")) == len(x["y"])
    with pytest.raises(UserError, match=r"own\.py:Net.*--network"):
        load_model(run)
    with pytest.raises(UserError, match="cannot be imported"):
        load_model(run, own_network="nowhere:Net")

    assert found.runs == fedshift.run(file, tmp_path / "runs").runs, "a finished run is not repeated"
    (tmp_path / "own.py").write_text(NET + "# changed\n")
    with pytest.raises(UserError, match=r"own\.py has changed"):
        fedshift.run(file, tmp_path / "runs")
    with pytest.warns(UserWarning, match="predictions may differ"):
        load_model(run, own_network=f"{file.parent}/own.py:Net")
    (tmp_path / "own.py").write_text(NET.replace("width=6", "width=7"))
    with pytest.warns(UserWarning, match="may differ"), pytest.raises(UserError, match="does not fit the network"):
        load_model(run, own_network=f"{file.parent}/own.py:Net")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NET + "\nraise SystemExit(3)\n", "ends Python while it is imported"),
        (NET.replace("super()", "raise SystemExit(7)\n        super()"), "cannot be made"),
        (NET + "    def forward(self, inputs):\n        return super().forward(inputs)[:16]\n", "returns 16 rows"),
    ],
)
def test_a_network_that_ends_python_or_returns_too_few_rows(text: str, words: str, tmp_path: Path) -> None:
    options = own(tmp_path, sites(tmp_path / "data"), text)
    with pytest.raises(UserError, match=words):
        fedshift.run(options, tmp_path / "runs")


@pytest.mark.slow
def test_networks_of_ours_and_what_check_says(tmp_path: Path) -> None:
    fedshift.run(experiment(sites(tmp_path / "data")), tmp_path / "runs")
    run = next((tmp_path / "runs").glob("**/seed-0"))
    with pytest.raises(UserError, match="leave out --network"):
        load_model(run, own_network="nowhere.py:Net")
    found = fedshift.check(own(tmp_path, sites(tmp_path / "data")))
    assert found.model == "own.py:Net"
    assert any("classifier: 5" in sentence for sentence in found.model_notes)


@pytest.mark.parametrize("method", ["csac", "kd3a"])
def test_volumes_train(method: str, tmp_path: Path) -> None:
    def volumes(seed: int) -> dict[str, Any]:
        labels = np.arange(14) % 2
        x = np.random.default_rng(seed).normal(size=(14, 1, 4, 4, 4)).astype(np.float32)
        return {"x": x + labels[:, None, None, None, None], "y": labels}

    data = save(tmp_path / "data", **{site: volumes(seed) for seed, site in enumerate("abc")})
    nets = Path(__file__).parents[1] / "models" / "own" / "nets.py"
    adapt = {"kind": "adapt_to_one", "targets": ["c"], "seeds": [0], "test_fraction": 0.3}
    steps = {"acquisition_steps": 1, "calibration_steps": 1} if method == "csac" else {}
    whole = experiment(data, model={"name": f"{nets}:Volumes"}, methods=[{"name": method, **steps}])
    whole |= {"protocol": adapt, "training": {"rounds": 1, "batch_size": 8}}
    whole["data"] |= {"classes": None, "standardise": True}
    (row,) = [row for row in fedshift.run(whole, tmp_path / "runs").rows() if row["target"] == "c"]
    assert 0 <= row["mean"] <= 100


def test_an_object_trains_as_its_file_does(tmp_path: Path) -> None:
    data = sites(tmp_path / "data")
    by_name = own(tmp_path, data)
    by_class = by_name | {"model": import_file(str(tmp_path / "own.py")).Net}
    for name, given in (("name", by_name), ("class", by_class)):
        fedshift.run(given, tmp_path / name)
    first, second = (next((tmp_path / name).glob("**/model.safetensors")) for name in ("name", "class"))
    assert first.read_bytes() == second.read_bytes()


def test_results_have_the_model_of_an_own_network(tmp_path: Path) -> None:
    """They know the file of the experiment that was run, so nobody has to name it again."""
    data = sites(tmp_path / "data")
    results = fedshift.run(own(tmp_path, data, training={"rounds": 1, "batch_size": 8, "lr": 0.05}), tmp_path / "runs")
    (run,) = (tmp_path / "runs").glob("**/seed-0")
    there = load_model(run, own_network=f"{tmp_path}/own.py:Net")
    x = features(4)["x"]
    assert np.array_equal(results.model().predict_proba(x), there.scores(x))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_workers_give_the_same_bits(tmp_path: Path) -> None:
    data = sites(tmp_path / "data")
    for name, engine in (("one", {"threads": 1}), ("two", {"threads": 1, "workers": 2})):
        fedshift.run(own(tmp_path, data, engine=engine), tmp_path / name)
    first, second = (next((tmp_path / name).glob("**/model.safetensors")) for name in ("one", "two"))
    ours, theirs = load_file(first), load_file(second)
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


VOLUMES = """
import monai.networks.nets as nets

def net(input_shape, classes):
    return nets.Classifier(input_shape, classes, channels=(4, 8), strides=(2, 2))
"""


@pytest.mark.slow  # imports timm or monai
@pytest.mark.parametrize(("package", "shape"), [("timm", (32, 32, 3)), ("monai", (1, 16, 16, 16))])
def test_a_published_network_trains_under_three_methods(package: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Nobody here wrote it, and the user's part is a line of the file, or that and a function."""
    pytest.importorskip(package)
    (tmp_path / "volumes.py").write_text(VOLUMES)
    draws = np.random.default_rng(0)
    held: dict[str, Any] = {}
    for site in "abc":
        x = draws.integers(0, 256, (16, *shape)).astype(np.uint8)
        held[site] = (x if package == "timm" else x.astype(np.float32) / 255, np.arange(16) % 2)
    results = fedshift.run(
        {
            "data": {"sites": held},
            "protocol": {"kind": "adapt_to_one", "targets": ["c"], "seeds": [0]},
            "model": "timm:mobilenetv3_small_100" if package == "timm" else f"{tmp_path}/volumes.py:net",
            "training": {"rounds": 1, "mini_batches": 6, "batch_size": 12, "lr": 0.001},
            "methods": ["fedavg", {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}, "kd3a"],
        },
        tmp_path / "runs",
    )
    trained = [
        load_file(next((tmp_path / "runs").rglob(f"{run.method}/c/seed-0/model.safetensors"))) for run in results.runs
    ]
    assert len(trained) == 3
    assert all(run.rounds for run in results.runs)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert any(not np.array_equal(trained[one][key], trained[other][key]) for key in trained[0])
