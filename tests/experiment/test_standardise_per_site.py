"""``data.standardise: per_site`` in runs: every engine, predictions, what is refused, and what tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from safetensors.numpy import load_file
from sklearn.preprocessing import StandardScaler
from small import experiment, features, images, outcome, save, sites, write

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from fedshift.model import Model

EVERY = {"kind": "participants", "seeds": [0], "test_fraction": 0.3}
METHODS = [{"name": "fedavg"}, {"name": "scaffold"}, {"name": "alone"}, {"name": "deepall"}]


def in_units(seed: int, samples: int) -> dict[str, Any]:
    """Vectors whose unit and zero differ between sites."""
    found = features(seed, samples)
    return {**found, "x": (found["x"] * 10**seed + 7 * seed).astype(np.float32)}


def options(where: dict[str, str], **changes: Any) -> dict[str, Any]:
    whole = experiment(where, **changes)
    whole["data"] |= {"standardise": "per_site"}
    return whole


@pytest.mark.slow
def test_a_run_is_that_of_data_which_were_scaled_before(tmp_path: Path) -> None:
    where = sites(tmp_path / "raw", in_units)
    run = {"protocol": EVERY, "methods": METHODS, "training": {"rounds": 3, "batch_size": 8, "lr": 0.1}}
    plan = Plan(parse(options(where, **run)), parse(options(where, **run)).data.build())
    rows = plan.split("sites", 0).train
    scaled = {}
    for name, path in where.items():
        held = np.load(path)
        scaler = StandardScaler().fit(held["x"][rows[name]].astype(np.float64))
        scaled[name] = {"x": scaler.transform(held["x"].astype(np.float64)).astype(np.float32), "y": held["y"]}
    before = save(tmp_path / "scaled", **scaled)
    fedshift.run(options(where, **run), tmp_path / "here")
    fedshift.run(experiment(before, **run), tmp_path / "there")
    for method in ("fedavg", "scaffold", "alone", "deepall"):
        place = Path("small", method, "sites", "seed-0", "model.safetensors")
        here, there = (load_file(tmp_path / folder / place) for folder in ("here", "there"))
        for name, tensor in here.items():
            np.testing.assert_allclose(tensor, there[name], atol=1e-4, err_msg=f"{method}: {name}")


@pytest.mark.case("engine", "worker processes and sites side by side: each site in its own scale")
@pytest.mark.slow
def test_engines_agree(tmp_path: Path) -> None:
    where = sites(tmp_path / "raw", in_units)
    for name, engine in (("one", {}), ("workers", {"workers": 2}), ("beside", {"sites": "side_by_side"})):
        whole = options(where, protocol=EVERY, engine={"name": "local", "threads": 1, **engine})
        fedshift.run(whole, tmp_path / name)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "workers")
    place = Path("small", "fedavg", "sites", "seed-0", "model.safetensors")
    one, beside = (load_file(tmp_path / name / place) for name in ("one", "beside"))
    for name, tensor in one.items():
        np.testing.assert_allclose(beside[name], tensor, atol=1e-5)


def test_a_new_site_is_scaled_by_the_rows_that_are_given_and_that_is_said(cli: Cli, tmp_path: Path) -> None:
    where = sites(tmp_path / "raw", in_units)
    file = write(tmp_path / "e.yaml", options(where))
    run = tmp_path / "runs" / "small" / "fedavg" / "a" / "seed-0"
    assert "scales 'a', where no one trains, by its own samples: every method reads these" in cli("check", file).out
    assert cli("run", file, "--runs", tmp_path / "runs").code == 0
    table = cli("table", tmp_path / "runs" / "small", "--format", "markdown").out
    assert "fedavg (reads target)" in table
    assert "Each site's samples are scaled by its own training samples" in table
    assert "differ in scale" not in table
    noted = fedshift.results(tmp_path / "runs" / "small").predictions("a", "fedavg").sort_values("row")
    x = np.load(where["a"])["x"]
    model = Model.load(run)
    with pytest.warns(UserWarning, match="the 30 samples are scaled by their own mean"):
        probabilities = model.predict_proba(x)
    np.testing.assert_allclose(probabilities, noted[[f"score_{name}" for name in "012"]].to_numpy(), atol=1e-6)
    result = cli("predict", run, where["a"])
    assert result.code == 0
    assert "the 30 samples are scaled by their own mean and deviation" in result.err
    np.savez(tmp_path / "one.npz", x=x[:1])
    refused = cli("predict", run, tmp_path / "one.npz")
    assert "there is only one: give all samples of the site together" in refused.error()
    refused = cli("export", run, "--to", "safetensors", "--out", tmp_path / "out")
    assert "use fedshift predict, or train with standardise: true" in refused.error()


def test_what_cannot_have_a_scale_of_its_site_is_refused_in_a_line(tmp_path: Path) -> None:
    where = sites(tmp_path / "vectors", in_units)
    pictures = sites(tmp_path / "images", images)
    private = {"rounds": 1, "batch_size": 8, "lr": 0.1, "privacy": {"noise_multiplier": 50.0, "delta": 0.01}}
    network = {"name": "mnist_cnn"}
    fedshift.run(options(pictures, model=network, protocol=EVERY), tmp_path / "fine")
    for whole, words in (
        (options(where, training=private), "which no noise covers"),
        (options(pictures, model=network, methods=[{"name": "deepall"}]), "this method pools them"),
    ):
        with pytest.raises(UserError, match=words):
            fedshift.run(whole, tmp_path / "runs")
    whole = options(where)
    whole["data"]["standardise"] = "per_centre"
    with pytest.raises(UserError, match=r"data\.standardise"):
        parse(whole)
