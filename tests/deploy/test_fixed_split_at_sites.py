"""A fixed test set in a deployment: the bits of the simulation, and nothing of the test rows that leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from loopback import Loopback, deploy, model, options_of, result, same, site_file

from fedshift.deploy.cli.site import check_site
from fedshift.deploy.privacy.table_view import few_samples
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment

SITES = {"north": 41, "south": 30, "east": 26}
FIELDS: dict[str, Any] = {"label": "ill", "numeric": ["age"], "categorical": ["sex"], "split": "part"}


def files_of(folder: Path) -> dict[str, Path]:
    files = {}
    for number, (site, rows) in enumerate(SITES.items()):
        draws = np.random.default_rng(number)
        lines = [
            f"{draws.normal(50, 9):.2f},{'fm'[row % 2]},{'ny'[int(draws.integers(2))]},{'train' if row % 4 else 'test'}"
            for row in range(rows)
        ]
        files[site] = folder / f"{site}.csv"
        files[site].write_text("age,sex,ill,part\n" + "\n".join(lines) + "\n")
    return files


def places_of(folder: Path, **policy: Any) -> dict[str, Path]:
    places = {}
    for site, file in files_of(folder).items():
        send = ["weights", "numbers", "accuracy", "statistics"]
        places[site] = site_file(folder, site, str(file), send=send, **policy)
        whole = yaml.safe_load(places[site].read_text())
        whole |= {"data": {"name": "table", **FIELDS, "sites": {site: str(file)}}, "classes": ["n", "y"]}
        places[site].write_text(yaml.safe_dump(whole))
    return places


@pytest.mark.parametrize(
    "protocol",
    [{"targets": ["east"]}, {"targets": ["sites"]}, {"kind": "adapt_to_one", "targets": ["east"]}],
)
def test_a_deployment_is_its_simulation(protocol: dict[str, Any], tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={**protocol, "seeds": [0]})
    target = protocol["targets"][0]
    deployed, _ = deploy(tmp_path, options, sites=SITES, unseen={}, transport=Loopback(places_of(tmp_path)))
    data = {"name": "table", **FIELDS, "sites": files_of(tmp_path)}
    simulated = run_experiment(parse({**options, "data": data, "engine": {"threads": 1}}), tmp_path / "simulated")
    assert same(model(deployed, "fedavg", target), model(simulated, "fedavg", target))
    here, there = (result(folder, "fedavg", target) for folder in (deployed, simulated))
    assert here["selected"] == there["selected"]
    sizes = {site["site"]: site["samples"] for site in here["sites"] if site["part"] == "target"}
    assert sizes == {site: len(range(0, SITES[site], 4)) for site in sizes}


@pytest.mark.case("fixed splits", "a site whose fixed test set is smaller than policy.smallest_group")
def test_site_check_counts_both_sides_and_foretells_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = places_of(tmp_path, smallest_group=10)
    check_site(places["north"])
    assert "30 samples train and 11 are a fixed test set" in capsys.readouterr().out
    config = load_site(places["east"])
    output = few_samples(read_holding(config).domain, config.file.policy)
    assert output is not None
    assert "no experiment" in output
    assert few_samples(read_holding(load_site(places["north"])).domain, config.file.policy) is None
