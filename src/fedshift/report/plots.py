"""Plots of an experiment: matplotlib figures, and SVG whose colours follow those of the page.

matplotlib is imported when a plot is drawn, not before. No display is needed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.summary import AVERAGE
from fedshift.report.collect import natural
from fedshift.report.html import render
from fedshift.report.measures import ACCURACY, Measure
from fedshift.report.run_means import Curve
from fedshift.report.table import Table
from fedshift.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER = "#1c2530", "#d5dae0", "#ffffff"
SERIES = ("#0b6bb0", "#d1570b", "#1f8a5b", "#a83a8c", "#8a6d00", "#5b57c4", "#b3263a", "#4a6b78")
"""One colour per method. From the ninth on they repeat with another line style and marker."""

_COLUMNS = 3
"""Panels in a row of a figure with many."""
DARK = ("#57a9e6", "#f08c4f", "#4cc38f", "#d77cc0", "#d0b03c", "#9a97f2", "#ef6a78", "#8fb2c1")
"""The same on dark screens."""
_LINES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


def accuracy_over_rounds(curves: Mapping[str, Mapping[str, Curve]], measure: Measure = ACCURACY) -> Figure:
    """Curves of methods, with a panel for each horizontal axis. The band is one standard deviation over seeds.

    ``curves``: label of the horizontal axis → method → curve, in percent.
    """
    figure, panels = new_figure(9.6, 3.6, len(curves))
    for axes, (label, lines) in zip(panels, curves.items(), strict=True):
        _draw(axes, lines, 100 if measure.unit else np.inf)
        axes.set_xlabel(label)
    panels[0].set_ylabel(measure.axis)
    _share_height(panels)
    _legend(figure, panels[0])
    return figure


def accuracy_at_targets(curves: Mapping[str, Mapping[str, Curve]], measure: Measure = ACCURACY) -> Figure:
    """Curves of methods over rounds, with a panel for each target, three in a row.

    ``curves``: target → method → curve, in percent.
    """
    columns = min(_COLUMNS, len(curves))
    figure, panels = _named_panels(curves, ("round", measure.axis), 2.2, columns, 100 if measure.unit else np.inf)
    for axes in panels[:-columns]:
        axes.set_xlabel("")
    _share_height(panels, columns)
    return figure


def operating_curves(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """ROC curves, with a panel for each target.

    ``curves``: target → method → (100 − specificity, sensitivity, None), in percent.
    """
    axis_names = "false alarms, %", "recognised, %"
    figure, panels = _named_panels(curves, axis_names, 2.9, min(_COLUMNS, len(curves)), 100)
    for axes in panels:
        axes.plot([0, 100], [0, 100], color=GRID, linewidth=1, zorder=1)
    return figure


def site_weights(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Each site's weight in the aggregate over rounds, with a panel for each target.

    The band is one standard deviation over seeds.

    ``curves``: target → site → curve.
    """
    columns = len(curves) if len(curves) <= 4 else _COLUMNS
    figure, panels = _named_panels(curves, ("round", "weight"), 2.5, columns, 1)
    for axes in panels:
        axes.set_ylim(bottom=0)
    _share_height(panels, columns)
    return figure


def _named_panels(
    curves: Mapping[str, Mapping[str, Curve]], axis_names: tuple[str, str], height: float, columns: int, most: float
) -> tuple[Figure, list[Axes]]:
    """A panel for each entry of ``curves``, with its name above it; a name has one colour in all of them."""
    figure, panels = new_figure(9.6, 0.6 + height * -(-len(curves) // columns), len(curves), columns)
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    for number, (axes, (title, lines)) in enumerate(zip(panels, curves.items(), strict=True)):
        _draw(axes, lines, most, names)
        axes.set_title(title, color=INK, fontsize="medium")
        axes.set_xlabel(axis_names[0])
        if number % columns == 0:
            axes.set_ylabel(axis_names[1])
    _legend(figure, *panels)
    return figure, panels


def accuracy_per_target(table: Table, names: Mapping[str, str] | None = None) -> Figure:
    """Mean and standard error of every method at every target and on average.

    Points and not bars: the differences between methods are small compared to the accuracies. What pools samples is a
    dash, the most frequent class a grey line. A thin line behind a point is the interval over the target's samples.

    ``names``: what the legend calls a method, where that is not its name.
    """
    figure, [axes] = new_figure(9.6, 3.6)
    shown = [AVERAGE, *(column for column in table.columns if column != AVERAGE)]  # a small screen shows the average
    columns = np.arange(len(shown))
    count = len(table.methods)
    step = min(0.14, 0.7 / count)
    for index, method in enumerate(table.methods):
        cells = [table.cells[method][column] for column in shown]
        present = [(column, cell.row) for column, cell in enumerate(cells) if cell is not None]
        if not present:
            continue
        color, _, marker = style_of(index)
        pooled = {"pooled", "oracle"} & set(table.badges.get(method, ()))
        x = [column + (index - (count - 1) / 2) * step for column, _ in present]
        errors = [row.standard_error or 0.0 for _, row in present]
        drawn: dict[str, Any] = (
            {"fmt": "_", "markersize": 13, "markeredgewidth": 2.5} if pooled else {"fmt": marker, "markersize": 6}
        )
        name = (names or {}).get(method, table.label(method))
        means = [row.mean for _, row in present]
        for position, row in zip(x, (row for _, row in present), strict=True):
            if row.interval:
                axes.vlines(position, *row.interval, color=color, linewidth=0.8, alpha=0.45)
        axes.errorbar(x, means, errors, color=color, capsize=2.5, linewidth=1.4, label=name, **drawn)
    _draw_majority(axes, table, shown)
    axes.axvline(0.5, color=GRID, linewidth=1)
    crowded = max(map(len, shown)) * len(columns) > 100
    axes.set_xticks(
        columns,
        [printable(column) for column in shown],
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.get_xticklabels()[0].set_fontweight("bold")
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylabel(table.measure.axis)
    _legend(figure, axes)
    return figure


def _draw_majority(axes: Axes, table: Table, shown: Sequence[str]) -> None:
    """A grey line at each target for what always naming its most frequent class would reach."""
    label = "most frequent class"
    for column, name in enumerate(shown):
        shares = [cell.row.majority for line in table.cells.values() if (cell := line[name])]
        share = next((known for known in shares if known is not None), None)
        if share is not None and table.measure.metric == "accuracy":
            axes.hlines(share, column - 0.45, column + 0.45, color=INK, linewidth=1, linestyle=":", label=label)


def reliability(curves: Mapping[str, Sequence[tuple[float, float, int]]]) -> Figure:
    """How often scores come true: a line per method, and a thin one for scores that do so exactly.

    ``curves``: method → (mean score, share that came true, samples) of each bin, in percent.
    """
    figure, [axes] = new_figure(4.8, 4.2)
    axes.plot([0, 100], [0, 100], color=GRID, linewidth=1)
    for index, (method, points) in enumerate(curves.items()):
        color, line, marker = style_of(index)
        scores, shares = [score for score, _, _ in points], [share for _, share, _ in points]
        axes.plot(scores, shares, color=color, linestyle=line, marker=marker, markersize=4, label=method)
    axes.set_xlabel("score, %")
    axes.set_ylabel("came true, %")
    _legend(figure, axes)
    return figure


def estimates(by_site: Mapping[str, tuple[float, float, float, float | None]]) -> Figure:
    """Estimates with their intervals, a line for each, the first at the top.

    ``by_site``: name → estimate, low and high end, and the usual number or None, in percent.
    """
    figure, [axes] = new_figure(9.6, 0.9 + 0.4 * len(by_site))
    for height, (middle, low, high, usual) in enumerate(by_site.values()):
        axes.plot([low, high], [height, height], color=SERIES[0], linewidth=2)
        axes.plot([middle], [height], color=SERIES[0], marker="o", markersize=6)
        if usual is not None:
            axes.plot([usual], [height], color=INK, marker="x", markersize=6, linestyle="none")
    axes.set_yticks(range(len(by_site)), list(by_site))
    axes.set_ylim(len(by_site) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy, %")
    return figure


def placed_samples(placed: Mapping[str, tuple[NDArray[np.float32], Sequence[str], Sequence[str]]]) -> Figure:
    """Samples as points, a row of two panels for each method: coloured by class, then by site.

    ``placed``: method → points (n, 2), class of each, site of each.
    """
    figure, panels = new_figure(9.6, 0.2 + 3.0 * len(placed), 2 * len(placed), 2)
    for number, axes in enumerate(panels):
        method, (points, *groups) = list(placed.items())[number // 2]
        names = groups[number % 2]
        for index, name in enumerate(sorted(set(names), key=natural)):
            color, _, marker = style_of(index)
            chosen = points[[other == name for other in names]]
            axes.plot(*chosen.T, linestyle="", marker=marker, markersize=3.5, color=color, label=name)
        axes.set_title(f"{method}, by {('class', 'site')[number % 2]}", color=INK, fontsize="medium")
        axes.tick_params(labelleft=False, labelbottom=False, length=0)
        axes.grid(visible=False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, labelcolor=INK, fontsize="small")
    return figure


def bytes_by_kind(sizes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Megabytes per run by kind of content, with a bar for each method and direction.

    ``sizes``: method → "up" or "down" → kind → bytes.
    """
    kinds = sorted({kind for ways in sizes.values() for by_kind in ways.values() for kind in by_kind})
    bars = [(method, way) for method in sizes for way in ("up", "down")]
    figure, [axes] = new_figure(9.6, 0.9 + 0.3 * len(bars))
    heights = np.array([index + 0.45 * (index // 2) for index in range(len(bars))])
    left = np.zeros(len(bars))
    for index, kind in enumerate(kinds):
        width = np.array([sizes[method].get(way, {}).get(kind, 0.0) / 1e6 for method, way in bars])
        axes.barh(heights, width, left=left, color=SERIES[-1 - index % len(SERIES)], height=0.8, label=kind)
        left += width
    for height, total in zip(heights, left, strict=True):
        axes.annotate(
            f"{total:,.1f}" if total else "0",
            (total, height),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(heights, [printable(f"{method}  {way}") for method, way in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("megabytes per run, all sites together")
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    _legend(figure, axes)
    return figure


def svg(figure: Figure, description: str) -> str:
    """A figure as an `<svg>` element that scales with its page, keeps text as text and fetches nothing.

    Its colours become the page's variables (--ink, --grid, --paper, --s0 … --s7), for light and dark screens.

    ``description``: the text for readers who do not see it. No two figures of a page may share it.
    """
    import matplotlib
    from matplotlib.text import Text

    for label in figure.findobj(Text):
        label.set_parse_math(False)  # a name may hold dollars
        label.set_text(printable(label.get_text(), keep="\n"))
    buffer = io.StringIO()
    # The salt gives a plot the same ids every time, and each plot of a page other ids.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": description, "text.parse_math": False}):
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    text = printable(buffer.getvalue(), keep="\n")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    for color, name in [(INK, "ink"), (GRID, "grid"), (PAPER, "paper"), *((c, f"s{i}") for i, c in enumerate(SERIES))]:
        body = body.replace(color, f"var(--{name})")
    body = re.sub(r'font-family: [^;"]*', "font-family: inherit", body)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it would apply to the whole page
    width = round(68 * min(1.0, figure.get_figwidth() / 9.6), 1)  # in rem: a whole page is 68 wide
    return render("figure.svg", box=box[0], width=width, description=description, body=body)


def new_figure(width: float, height: float, panels: int = 1, columns: int = 0) -> tuple[Figure, list[Axes]]:
    """A figure of ``width`` × ``height`` inches with ``panels`` empty axes, ``columns`` of them or all side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    columns = columns or panels
    rows = -(-panels // columns)
    every = [figure.add_subplot(rows, columns, index + 1, facecolor="none") for index in range(panels)]
    for axes in every:
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GRID)
        axes.tick_params(color=GRID, labelcolor=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    return figure, every


def _draw(axes: Axes, lines: Mapping[str, Curve], most: float, names: Sequence[str] = ()) -> None:
    """Draw lines with bands, which end at ``most``. A line's colour is its position in ``names``, else in ``lines``."""
    from matplotlib.ticker import MaxNLocator

    for name, (x, mean, spread) in lines.items():
        color, line, marker = style_of(list(names or lines).index(name))
        # A single measurement needs a marker to be visible.
        marks = marker if len(x) == 1 else ""
        axes.plot(x, mean, color=color, linestyle=line, marker=marks, linewidth=1.8, label=name)
        if spread is not None:
            low, high = np.maximum(np.subtract(mean, spread), 0), np.minimum(np.add(mean, spread), most)
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _share_height(panels: Sequence[Axes], columns: int = 0) -> None:
    """Give all panels the same vertical axis, which holds what any of them shows."""
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    for number, axes in enumerate(panels):
        if number:
            axes.sharey(panels[0])
        if number % (columns or len(panels)):
            axes.tick_params(labelleft=False)
    panels[0].set_ylim(min(lows), max(highs))


def style_of(index: int) -> tuple[str, str, str]:
    """The colour, line style and marker of the line at this position."""
    again = index // len(SERIES)
    return SERIES[index % len(SERIES)], _LINES[again % len(_LINES)], _MARKERS[again % len(_MARKERS)]


_LETTERS_AN_INCH, _LETTERS_OF_A_HANDLE = 14, 8
"""How wide a legend's entries are."""


def _legend(figure: Figure, *panels: Axes) -> None:
    """Draw one legend for all panels, each name once."""
    every = [zip(*reversed(axes.get_legend_handles_labels()), strict=True) for axes in panels]
    handles = dict(pair for pairs in every for pair in pairs)
    if handles:
        across = int(_LETTERS_AN_INCH * figure.get_figwidth() / (max(map(len, handles)) + _LETTERS_OF_A_HANDLE))
        where: dict[str, Any] = {"loc": "outside upper left", "ncols": max(1, min(len(handles), 6, across))}
        figure.legend(handles.values(), handles.keys(), frameon=False, labelcolor=INK, **where)
