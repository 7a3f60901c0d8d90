"""Runs that stop: a loss that explodes is divergence, and tables say why a run is unfinished."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small import experiment, sites

import fedshift
from fedshift.errors import TrainingDiverged, UserError
from fedshift.evaluation.records import RunResult
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Reporter
from fedshift.federation.training import has_exploded
from fedshift.report.check_words import _why_rounds_differ


def test_a_loss_that_explodes_but_stays_finite_is_divergence(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path))
    options["training"].update(lr=1e7)
    with pytest.raises(TrainingDiverged, match=r"training turned to \d.* at site") as caught:
        fedshift.run(options, tmp_path / "runs")
    loss = float(str(caught.value).partition("turned to ")[2].split()[0])
    assert math.isfinite(loss)
    assert has_exploded(loss, 1)
    assert not has_exploded(9.0, 0.001)  # not above 1 by much
    assert not has_exploded(2e5, 100)  # of features that are not scaled


def test_the_table_says_why_a_run_is_unfinished(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedprox", "proximal_weight": 1e30}]
    options = experiment(sites(tmp_path), methods=methods)
    with pytest.raises(TrainingDiverged):
        fedshift.run(options, tmp_path / "runs")
    found = fedshift.results(tmp_path / "runs")
    assert found.collected.progress.startswith("1 of 2 runs unfinished: fedprox, target a, seed 0: ")
    assert "1 of 2 runs unfinished: fedprox, target a, seed 0: training turned to inf" in found.markdown()


def test_check_says_why_rounds_differ(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), methods=["fedavg", {"name": "fedavg", "label": "long", "local_epochs": 3}])
    said = _why_rounds_differ(fedshift.check(options).methods)
    assert said.endswith("fedavg 3, long 9")  # sites b and c train on 17 and 23 samples, 8 in a mini-batch
    assert _why_rounds_differ(fedshift.check(experiment(sites(tmp_path))).methods) is None


def test_another_experiment_while_this_one_waits(tmp_path: Path) -> None:
    """The folder may have been filled between the first look and the lock."""
    options = experiment(sites(tmp_path), protocol={"targets": ["a", "b"], "seeds": [0]})
    other = {**options, "training": {"rounds": 1}, "protocol": {"targets": ["b"], "seeds": [0]}}

    class Meanwhile(Reporter):
        def on_finished(self, run: Run, result: RunResult, resumed: bool) -> None:
            if run.target == "a":
                fedshift.run(other, tmp_path / "runs")

    with pytest.raises(UserError, match="another experiment"):
        fedshift.run(options, tmp_path / "runs", Meanwhile())
