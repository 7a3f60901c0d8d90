"""Regression in a deployment: the scale that sites agree on, what they measure, and what small groups keep back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from loopback import Loopback, deploy, model, options_of, result, same, site_file

from fedshift.deploy.site_file import read_holding
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment

SITES = {"north": 41, "south": 30, "east": 26}
OPTIONS = options_of({"name": "fedavg"}, protocol={"targets": ["east"], "seeds": [0], "test_fraction": 0.4})


def tables(folder: Path) -> dict[str, Path]:
    """A CSV file per site with a quantity."""
    files = {}
    for number, (site, rows) in enumerate(SITES.items()):
        draws = np.random.default_rng(number)
        x = draws.normal(number, 1.0, rows)
        y = 100 * x + draws.normal(0, 10, rows)
        files[site] = folder / f"{site}.csv"
        files[site].write_text("x,y\n" + "\n".join(f"{a},{b}" for a, b in zip(x, y, strict=True)) + "\n")
    return files


def sites(folder: Path, changes: dict[str, dict[str, Any]] | None = None, **policy: Any) -> Loopback:
    """The sites, with a table each."""
    places = {}
    for site, file in tables(folder).items():
        places[site] = site_file(folder, site, str(file), **{"send": ["weights", "numbers", "accuracy", "metrics",
                                                                      "statistics"], **policy})  # fmt: skip
        whole = yaml.safe_load(places[site].read_text())
        del whole["classes"]
        data_section = {
            "name": "table",
            "task": "regression",
            "sites": {site: str(file)},
            "label": "y",
            "numeric": ["x"],
        }
        whole["data"] = data_section | (changes or {}).get(site, {})
        places[site].write_text(yaml.safe_dump(whole))
    return Loopback(places)


def test_a_deployment_is_its_simulation(tmp_path: Path) -> None:
    """Weights are equal to the last bit, and so is the scale of the label; measures of the target's site agree."""
    deployed, _ = deploy(tmp_path, OPTIONS, sites=SITES, unseen={}, transport=sites(tmp_path))
    data = {"name": "table", "task": "regression", "sites": tables(tmp_path), "label": "y", "numeric": ["x"]}
    simulated = run_experiment(parse({**OPTIONS, "data": data, "engine": {"threads": 1}}), tmp_path / "simulated")
    assert same(model(deployed, "fedavg", "east"), model(simulated, "fedavg", "east"))
    here, there = (result(folder, "fedavg", "east") for folder in (deployed, simulated))
    assert here["metric"] == "rmse"
    assert here["selected"] == there["selected"]
    (deployed_site,), (other,) = ([site for site in run["sites"] if site["part"] == "target"] for run in (here, there))
    assert deployed_site["values"] == other["values"]
    assert deployed_site["baseline"] == other["baseline"] > 0


def test_a_small_group_gives_no_error(tmp_path: Path) -> None:
    """Sites of which fewer samples are held out than their group say nothing of them."""
    with pytest.raises(UserError, match="smallest_group"):
        deploy(tmp_path, OPTIONS, sites=SITES, unseen={}, transport=sites(tmp_path, smallest_group=15))


def test_sites_learn_the_same(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="differ in what is learned"):
        deploy(tmp_path, OPTIONS, sites=SITES, unseen={}, transport=sites(tmp_path, {"south": {"loss": "absolute"}}))


def test_a_site_trains_on_no_other_task_than_its_own(tmp_path: Path) -> None:
    """A coordinator may choose the scale, and neither the task nor the loss."""
    held = read_holding(sites(tmp_path).programs["north"].config)
    asked = held.data.preprocessing
    assert asked.objective is not None
    table = {**asked.table} if asked.table else {}
    for objective, fits in (
        ({**asked.objective, "mean": 7.0}, True),
        ({**asked.objective, "loss": "absolute"}, False),
        (None, False),
    ):
        changed = asked.model_copy(update={"objective": objective, "table": table})
        if fits:
            assert held.source.encode(changed, held.data.classes).preprocessing.objective == objective
        else:
            with pytest.raises(UserError, match="another task"):
                held.source.encode(changed, held.data.classes)
