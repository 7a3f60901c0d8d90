"""The figure of FedADG's reference distribution, adaptive against fixed, from runs that are done:

    fedshift run benchmarks/experiments/reference_distribution.yaml --runs benchmarks/results
    python benchmarks/reference_distribution.py [FOLDER] [FIGURE]

Draws accuracy per unseen target and on average, mean and standard error over seeds, and prints what an adaptive
reference gains over a fixed one, on average over seeds and at each target.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedshift.report import differences
from fedshift.report.collect import collect
from fedshift.report.plots import accuracy_per_target
from fedshift.report.report import report_of
from fedshift.report.table import headline

HERE = Path(__file__).parent
FIXED = "fixed"


def main(folder: Path, figure: Path) -> None:
    """Draw the figure and print the differences."""
    collected = collect(folder)
    accuracy_per_target(report_of(collected, "last").table).savefig(figure, bbox_inches="tight")
    print(f"{figure}: {len(collected.results)} of {collected.planned} runs")
    pairs = [(label, FIXED) for label in collected.order.methods if label != FIXED]
    compared = differences.differences(collected.results, pairs)
    measure = headline(collected.results)
    print(differences.markdown(compared, collected.order.targets, measure), differences.note(measure), sep="\n")


if __name__ == "__main__":
    places = [Path(argument) for argument in sys.argv[1:]]
    source = places[0] if places else HERE / "results" / "reference_distribution"
    main(source, places[1] if len(places) > 1 else HERE / "reference_distribution.png")
