"""The figure of FedADG's reference distribution, adaptive against fixed, from runs that are done:

    fedshift run benchmarks/experiments/reference_distribution.yaml --runs benchmarks/results
    python benchmarks/reference_distribution.py [FOLDER] [FIGURE]

Draws accuracy per unseen target and on average, mean and standard error over seeds, and prints what an adaptive
reference gains over a fixed one, pair by pair of target and seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedshift.evaluation.summary import paired_difference
from fedshift.report.collect import collect
from fedshift.report.plots import accuracy_per_target
from fedshift.report.table import table_of

HERE = Path(__file__).parent
FIXED = "fixed"


def main(folder: Path, figure: Path) -> None:
    """Draw the figure and print the differences."""
    found = collect(folder)
    accuracy_per_target(table_of(found, "last")).savefig(figure, bbox_inches="tight")
    print(f"{figure}: {len(found.results)} of {found.planned} runs")
    by_method = {label: [run for run in found.results if run.method == label] for label in found.order.methods}
    for label in found.order.methods:
        pair = paired_difference(by_method[label], by_method[FIXED]) if label != FIXED else None
        if pair is not None:
            p = "" if pair.p is None else f", paired t-test p = {pair.p:.2g}"
            print(f"{label} − {FIXED} over {pair.n} pairs: {pair.mean:+.2f} points{p}")


if __name__ == "__main__":
    places = [Path(argument) for argument in sys.argv[1:]]
    source = places[0] if places else HERE / "results" / "reference_distribution"
    main(source, places[1] if len(places) > 1 else HERE / "reference_distribution.png")
