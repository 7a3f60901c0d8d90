"""Deployed sites that scale their samples by their own: the bits of the simulation, and no sum that leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from loopback import ADAPT, SITES, Loopback, model, options_of, request, result, same, site_file, write_data

from fedshift.deploy.coordinator import EXPERIMENT, coordinate
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.json_objects import write_object

ARRAYS: dict[str, Any] = {"name": "arrays", "classes": ["0", "1", "2"]}
SEND = ["weights", "numbers", "accuracy", "metrics", "features"]


def deploy_tables(
    folder: Path, options: dict[str, Any], unseen: dict[str, Any] | None, **changes: dict[str, Any]
) -> Path:
    """Run at `SITES`; ``changes`` changes the data section of a site."""
    files = write_data(folder / "data", {**SITES, "west": 30})
    places = {}
    for site in SITES:
        places[site] = site_file(folder, site, "", send=SEND)
        whole = yaml.safe_load(places[site].read_text())
        whole["data"] = {**ARRAYS, "standardise": "per_site", "sites": {site: files[site]}, **changes.get(site, {})}
        places[site].write_text(yaml.safe_dump(whole))
    deployment_folder = folder / "deployment"
    deployment_folder.mkdir()
    whole = {**options, "data": {"name": "sites", "unseen": unseen}, "engine": {"name": "flare", "threads": 1}}
    write_object(deployment_folder / EXPERIMENT, parse(whole).dump())
    coordinate(deployment_folder, Loopback(places), list(SITES))
    return deployment_folder / "runs" / "tiny"


@pytest.mark.case("deployment", "each site in its own scale: targets that train, hold out, or are at the coordinator")
@pytest.mark.parametrize(
    ("method", "protocol", "target"),
    [
        ("fedavg", {"targets": ["west"], "seeds": [0], "test_fraction": 0.3}, "west"),
        ("fedavg", {"targets": ["east"], "seeds": [0], "test_fraction": 0.3}, "east"),
        ("fedper", {"kind": "participants", "seeds": [0], "test_fraction": 0.3}, "sites"),
        ("kd3a", ADAPT, "east"),
    ],
)
def test_the_same_bits_as_a_simulation(tmp_path: Path, method: str, protocol: dict[str, Any], target: str) -> None:
    files = write_data(tmp_path / "data", {**SITES, **({"west": 30} if target == "west" else {})})
    options = options_of({"name": method}, protocol=protocol)
    whole = {**ARRAYS, "standardise": "per_site", "sites": files}
    here = run_experiment(parse({**options, "data": whole, "engine": {"threads": 1}}), tmp_path / "simulated")
    unseen = {**whole, "sites": {"west": files["west"]}} if target == "west" else None
    there = deploy_tables(tmp_path, options, unseen)
    assert same(model(here, method, target), model(there, method, target))
    ours, theirs = result(here, method, target), result(there, method, target)
    assert ours["selected"] == theirs["selected"]
    assert ours["sites"] == theirs["sites"]
    assert theirs["options"]["data"]["standardise"] == "per_site"
    plain = run_experiment(
        parse({**options, "data": {**ARRAYS, "sites": files}, "engine": {"threads": 1}}), tmp_path / "plain"
    )
    weights = zip(model(here, method, target).values(), model(plain, method, target).values(), strict=True)
    assert any(not np.allclose(weight, other) for weight, other in weights)


def test_sites_that_differ_are_found_before_training(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0], "test_fraction": 0.3})
    with pytest.raises(UserError, match=r"sites differ in data\.standardise"):
        deploy_tables(tmp_path, options, None, south={"standardise": False})


def test_a_coordinator_cannot_ask_for_another_scale(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    site_yaml = site_file(tmp_path, "north", files["north"])
    whole = yaml.safe_load(site_yaml.read_text())
    whole["data"] |= {"standardise": "per_site"}
    site_yaml.write_text(yaml.safe_dump(whole))
    answer = request(SiteProgram(load_site(site_yaml)))
    assert "refuses another data.standardise than its own" in answer["message"]
