"""What is not a mistake and has to work; and training that goes wrong, which has to say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from PIL import Image
from small import experiment, features, save, sites, write

import fedshift
from fedshift.errors import TrainingDiverged
from fedshift.federation.local.pool import WorkerPool
from tried import slow

CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
ALL = ["deepall", "fedavg", {"name": "fedprox"}, CSAC]
BATCH_NORM = {"name": "mlp", "hidden": [6], "batch_norm": True}


def _without(label: int, arrays: dict[str, Any]) -> dict[str, Any]:
    kept = arrays["y"] != label
    return {"x": arrays["x"][kept], "y": arrays["y"][kept]}


def _finite(results: fedshift.api.Results, runs: int) -> None:
    assert len(results.runs) == runs
    for row in results.rows():
        assert 0 <= row["mean"] <= 100


def test_a_site_that_lacks_a_class(cli: Cli, tmp_path: Path) -> None:
    where = save(tmp_path, a=_without(2, features(1)), b=_without(0, features(2)), c=features(3))
    options = experiment(where, protocol={"targets": ["a", "c"], "seeds": [0]}, methods=ALL)
    answer = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")
    assert answer.code == 0
    assert "warning: site 'a' has no sample of class 2" in answer.err
    assert "warning: site 'b' has no sample of class 0" in answer.err
    for method in ("deepall", "fedavg", "fedprox", "csac"):
        for target, absent in (("a", {2}), ("c", set())):
            folder = tmp_path / "runs" / "small" / method / target / "seed-0"
            result = json.loads((folder / "result.json").read_text())
            per_class = result["selected"]["last"]["per_class"]
            assert {number for number, accuracy in enumerate(per_class) if accuracy is None} == absent
            assert len(result["warnings"]) == 2
    checked = cli("check", tmp_path / "e.yaml")
    assert "warning: site 'a' has no sample of class 2" in checked.out


@pytest.mark.slow
def test_sizes_far_apart(tmp_path: Path) -> None:
    """600 samples, four (fewer than a batch) and one alone; each is a source and a target."""
    one = {name: array[:1] for name, array in features(4).items()}
    where = save(tmp_path, big=features(1, 600), small=features(2, 4), one=one)
    options = experiment(where, protocol={"seeds": [0], "test_fraction": 0.3}, model=BATCH_NORM, methods=ALL)
    results = fedshift.run(options, tmp_path / "runs")
    _finite(results, 12)
    assert any("only 1 samples" in warning for warning in results.runs[0].warnings)


@pytest.mark.parametrize("samples", [1, *map(slow, [2, 8, 9, 17])])
def test_a_last_batch_of_one_with_batch_norm(tmp_path: Path, samples: int) -> None:
    where = save(tmp_path, a=features(1, 12), b=features(2, samples), c=features(3, 12))
    options = experiment(where, protocol={"targets": ["a"], "seeds": [0], "test_fraction": 0}, model=BATCH_NORM)
    _finite(fedshift.run({**options, "methods": ALL}, tmp_path / "runs"), 4)


def test_one_source_only(tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1), b=features(2))
    results = fedshift.run(experiment(where, protocol={"seeds": [0]}, methods=ALL), tmp_path / "runs")
    _finite(results, 8)
    # With one site the pool is that site, and a mean of one model is that model: FedAvg is DeepAll but for its batches.
    accuracy = {(run.method, run.target): run.accuracy() for run in results.runs}
    assert abs(accuracy["fedavg", "a"] - accuracy["deepall", "a"]) < 15  # type: ignore[operator]


@pytest.mark.slow
def test_images_of_all_sorts_in_one_folder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grey, colour, palette and transparent images of many sizes and endings, and files that are none."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    kinds = [("L", "png"), ("RGB", "jpg"), ("P", "gif"), ("RGBA", "png"), ("1", "bmp"), ("CMYK", "tif"), ("LA", "webp")]
    for site in ("north", "south", "a site with blanks"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / site / label
            folder.mkdir(parents=True)
            for number, (mode, ending) in enumerate(kinds):
                height, width = int(rng.integers(3, 60)), int(rng.integers(3, 60))
                pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).convert(mode)
                if ending == "webp":
                    picture = picture.convert("RGBA")
                picture.save(folder / f"{number}.{ending}")
            (folder / "notes.txt").write_text("not an image")
    options = experiment(
        {},
        data={"name": "image_folder", "root": "photos", "size": 16},  # beside the experiment file
        protocol={"targets": "all", "seeds": [0]},
        model={"name": "mnist_cnn", "channels": [2, 3], "hidden": 8},
        training={"rounds": 1, "batch_size": 8, "augmentation": "csac"},
        methods=["fedavg", CSAC],
    )
    answer = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")
    assert answer.code == 0, answer.err
    result = json.loads((tmp_path / "runs/small/csac/a site with blanks/seed-0/result.json").read_text())
    assert result["classes"] == ["cat", "dog"]
    assert result["data"]["measured_samples"] == {"a site with blanks": 14}
    model = tmp_path / "runs/small/csac/north/seed-0"
    answer = cli("predict", model, tmp_path / "photos" / "south", "--format", "csv")
    assert answer.out.splitlines()[0] == "name,label,predicted,cat,dog"
    assert len(answer.out.splitlines()) == 15


def test_training_that_diverges(cli: Cli, tmp_path: Path) -> None:
    """One line with the run, the site, the round and the learning rate; exit code 1; nothing that looks finished."""
    for method in ALL:
        options = experiment(sites(tmp_path), methods=[method], model={"name": "mlp", "hidden": [8, 8]})
        options["training"].update(rounds=40, lr=1e30)
        answer = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")
        name = method if isinstance(method, str) else method["name"]
        assert answer.code == 1, (name, answer)
        assert answer.err.count("\n") == 1, answer.err
        assert answer.err.startswith(f"error: {name}, target a, seed 0: "), answer.err
        assert (
            "site 'pool'" in answer.err if name == "deepall" else "site 'b'" in answer.err or "site 'c'" in answer.err
        )
        assert "round " in answer.err
        assert "1e+30" in answer.err
    assert not list((tmp_path / "runs").rglob("result.json"))
    assert not list((tmp_path / "runs").rglob("model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"workers": 2}, {"parallel_runs": 2}])
def test_a_run_that_diverges_does_not_keep_the_others_from_being_run(
    cli: Cli, tmp_path: Path, engine: dict[str, Any], two_workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other method's runs are those of an experiment without it; the table is printed, and the error ends it.

    A worker is closed in the middle of a mini-batch, which leaves nothing behind, and others work on.
    """
    pools: list[WorkerPool] = []
    if "workers" in engine:
        monkeypatch.setattr(two_workers, "close", two_workers.forget)
        pools = [two_workers, WorkerPool(1, threads=1)]
        closed = pools[-1]
        monkeypatch.setattr("fedshift.experiment.runs.context.WorkerPool", lambda *_: pools.pop())
    where = sites(tmp_path)
    methods = [{"name": "fedprox", "proximal_weight": 1e30}, {"name": "fedavg"}]
    one = {"targets": ["a"], "seeds": [0]}
    options = experiment(where, protocol=one, methods=methods, engine={"name": "local", "threads": 1, **engine})
    answer = cli("run", write(tmp_path / "e.yaml", options), "--runs", tmp_path / "runs")
    assert answer.code == 1
    assert "fedavg" in answer.out
    assert not any(line.startswith("fedprox") for line in answer.out.splitlines()), "it has no row"
    lines = answer.err.splitlines()
    assert lines[-1].startswith("error: fedprox, target a, seed 0: ")
    assert "site 'b'" in lines[-1] or "site 'c'" in lines[-1]
    assert "round " in lines[-1]
    assert "0.05" in lines[-1], "the learning rate"
    if "workers" in engine:
        assert not pools
        assert all(connection.closed for connection in closed.connections)
        assert all(process.returncode is not None for process in closed._processes)
        assert not Path(closed._folder.name).exists()
    alone = fedshift.run(experiment(where, protocol=one, methods=["fedavg"]), tmp_path / "alone")
    if "parallel_runs" not in engine:  # what another process is at work on shows in the end alone
        assert sum(": diverged" in line for line in lines) == len(alone.runs)
    for run in alone.runs:
        place = Path("small") / "fedavg" / run.target / f"seed-{run.seed}" / "model.safetensors"
        assert (tmp_path / "runs" / place).read_bytes() == (tmp_path / "alone" / place).read_bytes()


def test_divergence_goes_on_to_nothing(tmp_path: Path) -> None:
    """Running again after a failure fails again at once, from the last good round."""
    options = experiment(sites(tmp_path), model={"name": "mlp", "hidden": [8, 8]})
    options["training"].update(rounds=40, lr=1e30)
    said = []
    for _ in range(2):
        with pytest.raises(TrainingDiverged) as caught:
            fedshift.run(options, tmp_path / "runs")
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_budget_that_ends_before_the_first_round(tmp_path: Path) -> None:
    """CSAC's acquisition takes all the mini-batches that the experiment grants; FedAvg takes the same."""
    options = experiment(sites(tmp_path), methods=["fedavg", {**CSAC, "acquisition_epochs": 5}])
    options["training"]["mini_batches"] = 6
    results = fedshift.run(options, tmp_path / "runs")
    assert {run.method: run.mini_batches for run in results.runs} == {"fedavg": 6, "csac": 6}
    assert {run.method: run.rounds for run in results.runs}["csac"] == 0
