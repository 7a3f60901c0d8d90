"""The table as one picture in a file of its own, for READMEs and papers: ``fedshift show --format svg``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedshift.evaluation.records import Selection
from fedshift.report import plots
from fedshift.report.collect import Collected
from fedshift.report.html import render, trusted
from fedshift.report.page import DARK, LIGHT
from fedshift.report.roles import ROLES, Role, role_of
from fedshift.report.table import Table, table_of

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
    names = {name: legend(table, name, role) for name, role in roles.items()}
    figure = plots.accuracy_per_target(table, names)
    return standalone(figure, f"{table.measure.name} of every method at every target")


def legend(table: Table, name: str, role: Role) -> str:
    """The name of a method with its role, and what its row used that others did not."""
    words = [] if role == "federated" else [ROLES[role]]
    words += [badge for badge in table.badges.get(name, ()) if badge not in ("pooled", "oracle")]
    return f"{name} ({'; '.join(words)})" if words else name


def standalone(figure: Figure, description: str) -> str:
    """A figure as an SVG file that brings its own colours, for light and dark screens.

    Args:
        figure: drawn with the colours of `plots`.
        description: the text for readers who do not see it.
    """
    width, height = (100 * size for size in figure.get_size_inches())
    drawn = trusted(plots.svg(figure, description))
    return render("picture.svg", drawn=drawn, width=width, height=height, light=LIGHT, dark=DARK)
