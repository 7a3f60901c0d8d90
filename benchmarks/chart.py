"""Draws rotated_mnist.svg, the README's chart, from the committed results: ``python benchmarks/chart.py``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fedshift.evaluation.summary import AVERAGE
from fedshift.report import plots
from fedshift.report.collect import collect
from fedshift.report.pictures.of_table import standalone
from fedshift.report.table import table_of

HERE = Path(__file__).parent
WHERE = {
    "rotated_mnist_family": {"deepall": "deepall (pooled, not private)"},
    "recipe_rotated_mnist": {"recipe": "recipe"},
    "recipe_rotated_mnist_deepall": {"deepall": "deepall, images moved as for recipe (pooled, not private)"},
}
"""Experiment → its methods that are shown under another name. Of the recipe's, these only."""


def averages() -> dict[str, tuple[float, float]]:
    """Name → mean and standard error over seeds of the average over all targets, the most accurate first."""
    found = {}
    for experiment, names in WHERE.items():
        table = table_of(collect(HERE / "results" / experiment))
        for method in table.methods if experiment == "rotated_mnist_family" else names:
            cell = table.cells[method][AVERAGE]
            assert cell is not None
            assert not cell.partial, method
            found[names.get(method, method)] = (cell.row.mean, cell.row.standard_error or 0.0)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def chart(found: dict[str, tuple[float, float]]) -> Figure:
    """A line per method: what pools samples in one colour, what does not in another."""
    figure = Figure(figsize=(9.6, 0.9 + 0.27 * len(found)), layout="constrained")
    axes = figure.add_subplot(facecolor="none")
    for height, (name, (mean, error)) in enumerate(found.items()):
        color = plots.SERIES[1 if "pooled" in name else 0]
        axes.errorbar(mean, height, xerr=error, color=color, fmt="o", markersize=7, capsize=3)
        axes.annotate(f"{mean:.2f}", (mean, height), (10, 0), textcoords="offset points", va="center", color=plots.INK)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("accuracy in percent, average over six unseen angles", color=plots.INK)
    axes.grid(axis="x", color=plots.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(color=plots.GRID, labelcolor=plots.INK)
    axes.margins(x=0.1)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(plots.GRID)
    return figure


def main() -> None:
    description = "Rotated MNIST: average accuracy over six unseen angles, by method"
    (HERE / "rotated_mnist.svg").write_text(standalone(chart(averages()), description), encoding="utf-8")


if __name__ == "__main__":
    main()
