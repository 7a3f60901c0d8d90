"""The table as one picture in a file of its own, for READMEs and papers: ``fedshift table --format svg``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedshift.evaluation.records import Selection
from fedshift.report import plots
from fedshift.report.collect import Collected
from fedshift.report.html import render, trusted
from fedshift.report.page import DARK, LIGHT
from fedshift.report.roles import ROLES, role_of
from fedshift.report.table import table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(collected: Collected, select: Selection = "last", metric: str = "") -> str:
    """Every method at every target, with standard errors, as SVG that follows light and dark screens.

    Methods that are no federation say so in the legend.

    Args:
        collected: finished runs.
        select: the selection rule whose round is shown.
        metric: the measure; "" is the experiment's headline.

    Raises:
        UserError: no run has this measure or selection.
    """
    table = table_of(collected, select, metric)
    roles = {result.method: role_of(result) for result in collected.results}
    names = {name: f"{name} ({ROLES[role]})" for name, role in roles.items() if role != "federated"}
    figure = plots.accuracy_per_target(table, names)
    return standalone(figure, f"{table.measure.name} of every method at every target")


def standalone(figure: Figure, description: str) -> str:
    """A figure as an SVG file that brings its own colours, for light and dark screens.

    Args:
        figure: drawn with the colours of `plots`.
        description: the text for readers who do not see it.
    """
    width, height = (100 * size for size in figure.get_size_inches())
    drawn = trusted(plots.svg(figure, description))
    return render("picture.svg", drawn=drawn, width=width, height=height, light=LIGHT, dark=DARK)
