"""A site that only trains needs neither scikit-learn nor matplotlib nor pyarrow; whoever reads experiments does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loopback import ADAPT, deploy, model, options_of, same, simulate

import fedshift
from fedshift.deploy.coordinator import coordinate
from fedshift.deploy.remote.transport import Transport
from fedshift.deploy.site_cards import card_of
from fedshift.errors import UserError
from fedshift.evaluation.measuring import rmse
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.runs.experiment_loop import run_experiment

HEAVY = ("matplotlib", "pyarrow", "sklearn")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this an environment without the extra `report`."""
    for name in list(sys.modules):
        if name.partition(".")[0] in HEAVY:
            monkeypatch.delitem(sys.modules, name)
    for name in HEAVY:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("method", ["fedavg", "csac", "kd3a"])
def test_sites_train_and_measure_without_the_packages_of_reports(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator shares their process here, so its own check is taken away."""
    options = options_of({"name": method}, protocol=ADAPT)
    simulated = simulate(tmp_path, options, unseen={})
    hide(monkeypatch)
    monkeypatch.setattr("fedshift.deploy.coordinator.reports_installed", lambda what: None)
    deployed, _ = deploy(tmp_path, options, unseen={})
    assert same(model(deployed, method, "east"), model(simulated, method, "east"))


def _holding(**changes: Any) -> Any:
    objective, unlabelled = changes.get("objective"), changes.get("unlabelled", False)
    return SimpleNamespace(
        data=SimpleNamespace(preprocessing=SimpleNamespace(objective=objective)),
        domain=SimpleNamespace(unlabelled=unlabelled),
    )


def _run(folder: Path) -> object:
    return run_experiment(Experiment.model_construct(engine=SimpleNamespace(name="local")), folder)


NEEDS: list[tuple[str, Callable[[Path], object]]] = [
    (
        "one machine",
        _run,
    ),
    ("a coordinator", lambda folder: coordinate(folder, Transport.__new__(Transport), [])),
    ("FederatedClassifier", lambda _: fedshift.FederatedClassifier),
    ("quantities", lambda _: card_of(_holding(objective={"task": "regression"}), {}, Any, "cpu")),
    ("predictions", lambda _: card_of(_holding(unlabelled=True), {}, Any, "cpu")),
    ("regression", lambda _: rmse(np.zeros(2), np.zeros(2))),
]


@pytest.mark.parametrize(("what", "needs_them"), NEEDS, ids=[what for what, _ in NEEDS])
def test_what_needs_them_says_so_before_anything_is_trained(
    what: str, needs_them: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch)
    with pytest.raises(UserError, match=r"pip install 'fedshift\[report\]'") as told:
        needs_them(tmp_path)
    assert what in str(told.value)
    assert not list(tmp_path.iterdir())
