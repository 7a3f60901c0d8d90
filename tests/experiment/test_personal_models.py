"""Runs of methods that make a model of each site's own: what each site is measured with, in every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import experiment, sites

import fedshift
from fedshift.errors import UserError
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL

KEEPING = [name for name in registry.names() if PERSONAL in registry.method_class(name)().traits.memory_names]
EVERY: dict[str, Any] = {"kind": "participants", "seeds": [0], "test_fraction": 0.3}
TUNED = {"name": "fedavg", "fine_tune": {"steps": 3, "lr": 0.2}}


def accuracies(folder: Path, name: str, *methods: Any, **changes: Any) -> list[dict[str, float]]:
    options = experiment(
        sites(folder), name=name, protocol=EVERY, methods=list(methods), model={"name": "mlp", "hidden": [6]}, **changes
    )
    runs = fedshift.run(options, folder / "runs").runs
    return [{site.site: site.values["brier"] for site in run.sites if site.part == "target"} for run in runs]


def test_a_site_is_measured_with_its_own_model(tmp_path: Path) -> None:
    common, tuned, own = accuracies(tmp_path, "all", "fedavg", TUNED, "fedper")
    assert len({common["a"], tuned["a"], own["a"]}) == 3


@pytest.mark.slow
def test_workers_give_the_same_bits(tmp_path: Path) -> None:
    methods = [*KEEPING, TUNED]
    workers = accuracies(tmp_path, "pool", *methods, engine={"name": "local", "threads": 1, "workers": 2})
    assert workers == accuracies(tmp_path, "one", *methods)


def test_a_method_without_a_model_for_new_sites_is_refused_there(tmp_path: Path) -> None:
    options = experiment(sites(tmp_path), methods=["fedper"], model={"name": "mlp", "hidden": [6]})
    with pytest.raises(UserError, match=r"fedper has no model for a new site.*protocol\.kind: participants"):
        fedshift.run(options, tmp_path / "runs")
