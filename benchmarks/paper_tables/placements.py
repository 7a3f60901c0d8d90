"""Where the models of an experiment place samples: t-SNE of features, kept as a file beside packed runs."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from fedshift.experiment.config.experiment import Experiment
from fedshift.json_objects import read_object, write_object
from fedshift.report.collect import collect
from fedshift.report.mistakes import ShownSamples

FEATURES = "features.json"
Point = TypedDict("Point", {"class": str, "site": str, "x": float, "y": float})
"""A sample: its class, its site, and where it is drawn."""


def measure(folder: Path, experiment: Experiment) -> None:
    """Write where the model of each method's first run places samples. The models are in the runs' folders."""
    samples, points = ShownSamples(experiment), dict[str, list[Point]]()
    for run in collect(folder).runs:
        placed = None if run.result.method in points else samples.placement(run)
        if placed is not None:
            named = zip(placed.classes, placed.sites, placed.points.round(2).tolist(), strict=True)
            points[run.result.method] = [
                {"class": label, "site": site, "x": x, "y": y} for label, site, (x, y) in named
            ]
    if points:
        write_object(folder / FEATURES, points, indent=None)


def read(folder: Path) -> dict[str, list[Point]]:
    """Method → the samples, as `measure` wrote them; empty if it wrote nothing.

    Raises:
        UserError: the file is damaged.
    """
    return read_object(folder / FEATURES, "restore it, or remove it and the experiment's folder, and run again")
