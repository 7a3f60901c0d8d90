"""Draws series of numbers, ours beside what a paper printed, and writes them as an SVG file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedshift.report.plots import INK, new_figure, style_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_IN_A_ROW, _COLUMNS = 4, 3


@dataclass(frozen=True)
class Series:
    """Numbers of one name, along numbers or names: ours, or those that a paper printed."""

    name: str
    x: Sequence[float | str]
    mean: Sequence[float]
    error: Sequence[float | None]
    published: bool = False


@dataclass(frozen=True)
class SeriesPanel:
    """Series with common axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    points: bool = False
    """Whether each pair of numbers stands for itself. The axes then have no meaning."""


def ours_and_published(panels: Sequence[SeriesPanel], note: str = "") -> Figure:
    """Panels side by side, or three in a row: lines along numbers, points along names.

    What a paper printed is hollow and dashed.

    Args:
        panels: what to draw.
        note: a sentence below the panels.
    """
    columns = len(panels) if len(panels) <= _MOST_IN_A_ROW else _COLUMNS
    height = 4.2 if len(panels) <= columns else 3.4 * -(-len(panels) // columns)
    figure, every = new_figure(max(7.2, 4.8 * columns), height, len(panels), columns)
    for axes, panel in zip(every, panels, strict=True):
        names = list(dict.fromkeys(series.name for series in panel.series))
        places = list(dict.fromkeys(x for series in panel.series for x in series.x if isinstance(x, str)))
        step = min(0.14, 0.7 / max(1, len(panel.series)))
        for number, series in enumerate(panel.series):
            color, _, marker = style_of(names.index(series.name))
            shift = (number - (len(panel.series) - 1) / 2) * step
            x = [places.index(value) + shift if isinstance(value, str) else value for value in series.x]
            if panel.points:
                axes.plot(x, series.mean, color=color, linestyle="", marker=marker, markersize=3.5, label=series.name)
                continue
            dense = len(x) > 12
            axes.errorbar(
                x,
                series.mean,
                None if dense else [error or 0.0 for error in series.error],
                color=color,
                marker="" if dense else marker,
                markerfacecolor="none" if series.published else color,
                linestyle="" if places else "--" if series.published else "-",
                markersize=5,
                capsize=2.5,
                linewidth=1.4,
                label=f"{series.name} (published)" if series.published else series.name,
            )
        if panel.points:
            axes.tick_params(labelleft=False, labelbottom=False, length=0)
            axes.grid(visible=False)
        elif places:
            crowded = sum(map(len, places)) > 36
            axes.set_xticks(
                range(len(places)), places, rotation=35 if crowded else 0, ha="right" if crowded else "center"
            )
            axes.grid(axis="x", visible=False)
        else:
            axes.locator_params(
                axis="x", integer=all(float(x).is_integer() for series in panel.series for x in series.x)
            )
        axes.set_title(panel.title, color=INK, fontsize="medium")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            covers = panel.points or len(handles) > 6  # among so many points there is no room left
            beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if covers else {}
            axes.legend(handles, labels, frameon=False, labelcolor=INK, fontsize="small", **beside)
    if note:
        figure.supxlabel(textwrap.fill(note, 80 * columns), fontsize="small", color=INK)
    return figure


def svg_file(figure: Figure) -> bytes:
    """A figure as an SVG file with text as text. The same numbers give the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedshift", "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
