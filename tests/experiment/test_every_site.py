"""`targets: [sites]` in a simulation: one model of all sites, measured on what they hold out, as in a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import experiment, features, save, sites, write

import fedshift
from fedshift.errors import UserError
from fedshift.model import Model
from tried import case

EVERY: dict[str, Any] = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}


@pytest.mark.case("targets", "sites, in a simulation")
def test_a_model_of_all_sites_is_measured_where_samples_are_held_out(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol=EVERY, methods=["fedavg", "deepall"])
    foretold = fedshift.check(options)
    results = fedshift.run(options, tmp_path / "runs")
    assert {method.label: method.runs for method in foretold.methods} == {"fedavg": 1, "deepall": 1}
    for run in results.runs:
        assert run.data["training_samples"] == {"a": 21, "b": 18, "c": 24}
        assert run.data["measured_samples"] == {"a": 9, "b": 6, "c": 9}
        measured = {site.site: site.values["accuracy"] for site in run.sites if site.part == "target"}
        assert run.accuracy() == pytest.approx(np.mean([measured[name] for name in "abc"]))
        model = Model.load(tmp_path / "runs" / "small" / run.method / "sites" / "seed-0")
        assert model.metadata["sources"] == ["a", "b", "c"]
    left_out = fedshift.run(experiment(sites(tmp_path), name="out"), tmp_path / "runs")
    assert left_out.runs[0].data["training_samples"] == {"b": 18, "c": 24}, "as many rows of each as with a target"


@pytest.mark.case("targets", "sites beside a domain; table, page, advice and model card")
def test_every_reader_of_results_takes_it(cli: Cli, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol={**EVERY, "targets": ["a", "sites"]})
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    assert cli("check", file).code == 0
    assert cli("run", file, "--runs", runs, "--samples").code == 0
    assert "sites" in cli("table", runs / "small", "--format", "csv").out
    assert cli("show", runs / "small", "--verdict").code == 0
    exported = runs / "small" / "fedavg" / "sites" / "seed-0"
    assert cli("export", exported, "--to", "torchscript", "--out", tmp_path / "out").code == 0
    assert "unseen in training" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("protocol", "match"),
    [
        case("targets", "sites, adapting to one", {"kind": "adapt_to_one"}, "leave_one_out"),
        case("targets", "sites, none held out", {"test_fraction": 0}, "test_fraction"),
        case("targets", "site for sites", {"targets": ["site"]}, "no domain"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, protocol: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        fedshift.check(experiment(sites(tmp_path), protocol={**EVERY, **protocol}))
    assert "\n" not in str(caught.value)


def test_groups_and_cut_sources(tmp_path: Path) -> None:
    where = save(tmp_path, a={**features(1), "groups": np.arange(30) // 3}, b=features(2))
    run = fedshift.run(experiment(where, protocol=EVERY), tmp_path / "runs").runs[0]
    assert run.data["measured_samples"] == {"a": 9, "b": 9}
    cut = experiment(sites(tmp_path / "cut"), name="cut", protocol={**EVERY, "sites_each": 2})
    names = fedshift.run(cut, tmp_path / "runs").runs[0].data["training_samples"]
    assert list(names) == ["a.1", "a.2", "b.1", "b.2", "c.1", "c.2"]


@pytest.mark.case("targets", "a site that is called sites")
def test_a_site_of_that_name_is_the_target(tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1), sites=features(2))
    run = fedshift.run(experiment(where, protocol=EVERY), tmp_path / "runs").runs[0]
    assert list(run.data["training_samples"]) == ["a"]
