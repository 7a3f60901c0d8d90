"""Draws rotated_mnist.svg, the README's chart, from the committed results: ``python benchmarks/chart.py``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshift.evaluation.summary import AVERAGE
from fedshift.report import plots
from fedshift.report.collect import collect
from fedshift.report.report import report_of
from fedshift.report.table_picture import standalone

HERE = Path(__file__).parent
PANELS: dict[str, dict[str, dict[str, str]]] = {
    "images as they are": {"rotated_mnist_family": {"deepall": "deepall (pooled, not private)"}},
    "images moved alike": {
        "recipe_rotated_mnist": {"recipe": "recipe", "four-exchanges": "recipe, four exchanges an epoch"},
        "recipe_rotated_mnist_deepall": {"deepall": "deepall (pooled, not private)"},
    },
}
"""Title of a panel → experiment → its methods under the names shown. Of the family all methods are shown.

Only rows of one panel had the same images. FedAvg on moved images was run at two of the six angles, so it is in none.
"""


def averages(panel: str) -> dict[str, tuple[float, float]]:
    """Name → mean and standard error over seeds of the average over all targets, the most accurate first."""
    series = {}
    for experiment, names in PANELS[panel].items():
        table = report_of(collect(HERE / "results" / experiment)).table
        for method in table.methods if experiment == "rotated_mnist_family" else names:
            cell = table.cells[method][AVERAGE]
            assert cell is not None
            assert not cell.partial, method
            series[names.get(method, method)] = (cell.row.mean, cell.row.standard_error or 0.0)
    return dict(sorted(series.items(), key=lambda item: -item[1][0]))


def chart(panels: dict[str, dict[str, tuple[float, float]]]) -> Figure:
    """A panel for each way with images, a line per method; what pools samples has a colour of its own."""
    heights = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(9.6, 1.4 + 0.27 * sum(heights)), layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights)
    for axes, (title, rows) in zip(every, panels.items(), strict=True):
        _draw(axes, title, rows)
    every[-1].set_xlabel("accuracy in percent, average over six unseen angles", color=plots.INK)
    return figure


def _draw(axes: Axes, title: str, rows: dict[str, tuple[float, float]]) -> None:
    axes.patch.set_visible(False)
    axes.set_title(title, color=plots.INK, fontsize="medium", loc="left")
    for height, (name, (mean, error)) in enumerate(rows.items()):
        color = plots.SERIES[1 if "pooled" in name else 0]
        axes.errorbar(mean, height, xerr=error, color=color, fmt="o", markersize=7, capsize=3)
        axes.annotate(
            f"{mean:.2f}", (mean + error, height), (10, 0), textcoords="offset points", va="center", color=plots.INK
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(axis="x", color=plots.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(color=plots.GRID, labelcolor=plots.INK)
    axes.margins(x=0.1, y=0.15)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(plots.GRID)


def main() -> None:
    description = "Rotated MNIST: average accuracy over six unseen angles, by method"
    (HERE / "rotated_mnist.svg").write_text(
        standalone(chart({panel: averages(panel) for panel in PANELS}), description), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
