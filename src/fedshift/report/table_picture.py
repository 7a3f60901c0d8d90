"""The table as one picture in a file of its own, for READMEs and papers: ``fedshift show --format svg``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedshift.report import plots
from fedshift.report.conditions import ROLES, Role
from fedshift.report.html import mark_trusted, render
from fedshift.report.page import DARK, LIGHT
from fedshift.report.report import Report
from fedshift.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(report: Report) -> str:
    """Every method at every target, with standard errors, as SVG that follows light and dark screens.

    Methods that are no federation say so in the legend.
    """
    table = report.table
    names = {name: legend(table, name, role) for name, role in report.roles.items()}
    figure = plots.accuracy_per_target(table, names)
    return standalone(figure, f"{table.measure.name} of every method at every target")


def legend(table: Table, name: str, role: Role) -> str:
    """The name of a method with its role, and what its row used that others did not."""
    words = [] if role == "federated" else [ROLES[role]]
    words += [badge for badge in table.badges.get(name, ()) if badge not in ("pooled", "oracle")]
    return f"{name} ({'; '.join(words)})" if words else name


def standalone(figure: Figure, description: str) -> str:
    """A figure as an SVG file that brings its own colours, for light and dark screens.

    ``figure``: drawn with the colours of `plots`; ``description``: the text for readers who do not see it.
    """
    width, height = (100 * size for size in figure.get_size_inches())
    drawn = mark_trusted(plots.svg(figure, description))
    return render("picture.svg", drawn=drawn, width=width, height=height, light=LIGHT, dark=DARK)
