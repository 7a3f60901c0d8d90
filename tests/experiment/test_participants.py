"""participants: all sites train, each is measured on its own test part with its own model, beside common test sets."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calling import Cli
from small import experiment, features, save, sites, write

import fedshift
from fedshift.errors import UserError
from fedshift.experiment import check as check_module
from fedshift.experiment import costs
from fedshift.experiment.check import MeasuringTime
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from fedshift.experiment.predict import load_model

EVERY: dict[str, Any] = {"kind": "participants", "seeds": [0, 1], "test_fraction": 0.3}


def four(folder: Path) -> dict[str, str]:
    """Three sites, and a common test set."""
    return {**sites(folder), **save(folder, t=features(4, 40))}


@pytest.mark.case("protocol", "participants: parts of each site, a common test set, every reader of results")
def test_each_site_is_measured_on_its_own_test_part(cli: Cli, tmp_path: Path) -> None:
    options = experiment(
        four(tmp_path), protocol={**EVERY, "common_tests": "t"}, methods=["fedavg", "alone", "deepall"]
    )
    file, runs = write(tmp_path / "e.yaml", options), tmp_path / "runs"
    assert cli("check", file).code == 0
    result = cli("run", file, "--runs", runs)
    assert result.code == 0
    assert "It pays for" in result.out, result.out
    results = fedshift.results(runs / "small")
    assert len(results.runs) == 6, "one for each method and seed"
    for run in results.runs:
        assert run.data["training_samples"] == {"a": 21, "b": 18, "c": 24}
        assert run.data["measured_samples"] == {"a": 9, "b": 6, "c": 9}
        own = {site.site: site.values["accuracy"] for site in run.sites if site.part == "target"}
        common = {site.site: site for site in run.sites if site.part == "common"}
        assert run.accuracy() == pytest.approx(fmean(own.values())), "each site counts alike, the common set not at all"
        assert {name: one.samples for name, one in common.items()} == {"t": 40}
    by_row = {(row["method"], row["target"]): row["seeds"] for row in results.rows()}
    for method in ("fedavg", "alone", "deepall"):
        each = [by_row[method, site] for site in "abc"]
        assert by_row[method, "average"] == pytest.approx([fmean(seed) for seed in zip(*each, strict=True)])
        assert by_row[method, "worst site"] == [min(seed) for seed in zip(*each, strict=True)]
        assert by_row[method, "spread over sites"] == pytest.approx([stdev(seed) for seed in zip(*each, strict=True)])
        assert len(by_row[method, "t"]) == 2
    gains = {pay["site"]: pay["gain"] for pay in results.verdict()["pays"]}
    assert gains == pytest.approx(
        {name: fmean(by_row["fedavg", name]) - fmean(by_row["alone", name]) for name in "abc"}
    )
    table = cli("table", runs / "small", "--format", "markdown").out
    assert "on common test sets" in table
    assert "Does it pay for each of you?" in (runs / "small" / "report.html").read_text()
    assert json.loads(cli("show", runs / "small", "--verdict", "--format", "json").out)["pays"]


def test_a_site_with_a_model_of_its_own_is_measured_with_it(tmp_path: Path) -> None:
    where = four(tmp_path)
    options = experiment(where, protocol={**EVERY, "seeds": [0], "common_tests": ["t"]}, methods=["alone"])
    run = fedshift.run(options, tmp_path / "runs").runs[0]
    trained = load_model(tmp_path / "runs" / "small" / "alone" / "sites" / "seed-0")
    predictions = fedshift.results(tmp_path / "runs" / "small").predictions
    members = list(trained.network.eval().members)
    for place, name in enumerate("abc"):
        found = predictions(name, "alone")
        rows = found.loc[found["part"] == "target", "row"].to_numpy()
        arrays = np.load(where[name])
        said = members[place](torch.from_numpy(arrays["x"][rows])).argmax(1).numpy()
        measured = next(site for site in run.sites if (site.site, site.part) == (name, "target"))
        assert measured.values["accuracy"] == pytest.approx(100 * np.mean(said == arrays["y"][rows]))


APART: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [8], "batch_norm": True},
    "methods": ["fedbn"],
    "training": {"rounds": 12, "batch_size": 8, "lr": 0.02},
}


def apart(folder: Path, name: str, protocol: dict[str, Any], **changes: Any) -> dict[str, float]:
    """Each site's accuracy where inputs differ by so much that only a site's own mean fits it."""
    where = save(folder, a=features(1, 60), b=features(2, 60, shift=12), c=features(3, 60, shift=-12))
    options = experiment(where, name=name, protocol=protocol, **APART, **changes)
    last = fedshift.run(options, folder / "runs").runs[0].selected["last"]
    assert last is not None
    return last.sites


@pytest.mark.slow
def test_batch_norm_of_a_site_is_used_there(tmp_path: Path) -> None:
    own = apart(tmp_path, "own", {**EVERY, "seeds": [0]})
    published = apart(tmp_path, "published", {"targets": ["sites"], "seeds": [0]})
    assert min(own.values()) > 60
    assert min(published.values()) < 50


@pytest.mark.slow
@pytest.mark.case("engine.workers", "a site's own model, which only its process has")
def test_the_process_of_a_site_gives_its_own_model(tmp_path: Path) -> None:
    protocol = {**EVERY, "seeds": [0]}
    workers = apart(tmp_path, "workers", protocol, engine={"name": "local", "threads": 1, "workers": 2})
    assert workers == apart(tmp_path, "one", protocol)


def test_validation_parts_choose_the_round_and_test_nothing(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), protocol={**EVERY, "seeds": [0], "validation_fraction": 0.25})
    run = fedshift.run(options, tmp_path / "runs").runs[0]
    assert run.data["measured_samples"] == {"a": 9, "b": 6, "c": 9}, "as without"
    assert all(run.data["held_out_samples"][name] > 0 for name in "abc")
    whole = {name: run.data["training_samples"][name] + run.data["held_out_samples"][name] for name in "abc"}
    assert whole == {"a": 21, "b": 18, "c": 24}
    assert run.selected["source"] is not None


def test_no_base_sample_of_a_common_test_set_trains(tmp_path: Path) -> None:
    groups = np.arange(30)
    where = save(
        tmp_path,
        a={**features(1), "groups": groups},
        b={**features(2), "groups": groups},
        t={**features(1), "groups": groups},
    )
    run = fedshift.run(
        experiment(where, protocol={**EVERY, "seeds": [0], "common_tests": ["t"]}), tmp_path / "runs"
    ).runs[0]
    common = next(site for site in run.sites if site.part == "common")
    assert common.samples == run.data["measured_samples"]["a"] == 30 - run.data["training_samples"]["a"]


@pytest.mark.case("data.split", "a site all of whose rows are test")
def test_a_site_of_test_rows_measures_and_does_not_train(tmp_path: Path) -> None:
    alone = {**features(4, 40), "split": np.array(["test"] * 40)}
    where = {**sites(tmp_path), **save(tmp_path, t=alone)}
    for standardise in (False, True):
        options = experiment(where, name=f"s{standardise}", protocol={**EVERY, "seeds": [0]})
        options["data"] |= {"standardise": standardise}
        run = fedshift.run(options, tmp_path / "runs").runs[0]
        assert list(run.data["training_samples"]) == ["a", "b", "c"]
        assert [(site.site, site.samples) for site in run.sites if site.part == "common"] == [("t", 40)]
    with pytest.raises(UserError, match="'t' has no training samples"):
        fedshift.check(experiment(where, name="out"))


def test_sites_can_be_cut_and_targets_are_none(tmp_path: Path) -> None:
    protocol = {**EVERY, "seeds": [0], "common_tests": ["t"], "drop": ["c"], "sites_each": 2}
    run = fedshift.run(experiment(four(tmp_path), protocol=protocol), tmp_path / "runs").runs[0]
    assert list(run.data["training_samples"]) == ["a.1", "a.2", "b.1", "b.2"]
    assert [site.site for site in run.sites if site.part == "common"] == ["t"]
    with pytest.raises(UserError, match="needs a target"):
        fedshift.check(experiment(four(tmp_path), protocol=EVERY, methods=["oracle"]))


@pytest.mark.slow
@pytest.mark.case("fedshift check", "bytes of many sites from those of a few")
def test_bytes_of_many_sites_are_those_of_a_dry_run_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(tmp_path, **{f"s{number}": features(number, 8) for number in range(64)})
    options = experiment(where, protocol={**EVERY, "seeds": [0]}, methods=["fedavg", "alone", "scaffold"])
    few = fedshift.check(options)
    monkeypatch.setattr(costs, "_MANY", 100)
    every = fedshift.check(options)
    for short, whole in zip(few.methods, every.methods, strict=True):
        assert (short.bytes_up, short.bytes_down) == (whole.bytes_up, whole.bytes_down)


def test_time_to_measure_is_in_the_estimate(tmp_path: Path) -> None:
    """Rounds that are not measured take no time for it."""
    plan, clocks = {}, []
    for every in (1, 2):
        training = {"rounds": 4, "batch_size": 8, "lr": 0.05, "measure_every": every}
        parsed = parse(experiment(sites(tmp_path), protocol=EVERY, training=training))
        plan[every] = Plan(parsed, parsed.protocol.taking_part(parsed.data.build()))
        clocks.append(SimpleNamespace(measuring=lambda personal: MeasuringTime(1.0, 0.01, 2.0, 0.1)))
    per_round, at_the_end = 3 * 1.0 + 24 * 0.01, 3 * 2.0 + 24 * 0.1  # three sites with 24 test samples
    assert check_module._measuring(plan[1].runs[0], clocks[0]) == pytest.approx(4 * per_round + at_the_end)
    assert check_module._measuring(plan[2].runs[0], clocks[1]) == pytest.approx(2 * per_round + at_the_end)


@pytest.mark.parametrize(
    ("protocol", "match"),
    [
        ({"common_tests": ["T"]}, "no domain is called 'T'"),
        ({"common_tests": ["a"], "drop": ["a"]}, "protocol.drop"),
        ({"drop": ["T"]}, "protocol.drop: no domain is called 'T'"),
        ({"common_tests": ["a", "b", "c", "t"]}, "no site is left to train"),
        ({"targets": ["a"]}, "targets"),
    ],
)
@pytest.mark.case("protocol", "participants: mistakes")
def test_a_mistake_is_one_line(tmp_path: Path, protocol: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        fedshift.check(experiment(four(tmp_path), protocol={**EVERY, **protocol}))
    assert "\n" not in str(caught.value)
