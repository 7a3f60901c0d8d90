"""``fedshift check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedshift.cli.console import safe_console
from fedshift.experiment.check import check, noise_costs
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.report.check_words import Block, Line, of_plan, of_runs, print_blocks


def check_file(path: Path, overrides: Sequence[str], runs: Path = Path("runs"), *, noise_cost: bool = False) -> None:
    """Print what is known about an experiment before it trains, and what of it is finished in the folder ``runs``.

    ``noise_cost``: also train with and without noise, and print the accuracies.
    """
    experiment = load(path, overrides)
    result = check(experiment, runs)
    console = safe_console()
    print_blocks(console, of_plan(experiment, result))
    if noise_cost:
        print_blocks(console, _of_noise(experiment))
    print_blocks(console, of_runs(experiment, result, runs / experiment.name))


def _of_noise(experiment: Experiment) -> Iterator[Block]:
    """What the noise of private training costs; a line as soon as it is known."""
    for cost in noise_costs(experiment):
        what = f"{cost.method} → {cost.target}, seed {experiment.protocol.seeds[0]}"
        yield Line(f"{what}: {cost.private:.2f} % with noise, {cost.plain:.2f} % without")
