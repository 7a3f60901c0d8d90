"""``fedshift check``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.arguments import ExperimentFile, Overrides, Runs, Trust, may_ask
from fedshift.experiment.config.experiment_file import refuse_slips

if TYPE_CHECKING:
    from fedshift.experiment.config.experiment import Experiment
    from fedshift.report.check_words import Block


def check(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    noise_cost: Annotated[
        bool,
        typer.Option("--noise-cost", help="Train once with training.privacy and once without; say both accuracies."),
    ] = False,
    trust: Trust = False,
) -> None:
    """Report what is known before training: data, classes, sizes, compatibility, the expected hours and bytes.

    Also says how many of its runs are finished, or that the folder of its runs belongs to another experiment.

    Example: fedshift check hearts.yaml 'data={name: heart_disease}' --noise-cost
    """
    refuse_slips(experiment, overrides or [])  # before torch is imported
    from fedshift.cli.console import safe_console
    from fedshift.experiment import check as checks
    from fedshift.experiment.config.experiment import load
    from fedshift.report.check_words import of_plan, of_runs, print_blocks

    with may_ask(trust):
        whole = load(experiment, overrides or [])
        result, console = checks.check(whole, runs), safe_console()
        print_blocks(console, of_plan(whole, result))
        if noise_cost:
            print_blocks(console, _of_noise(whole))
        print_blocks(console, of_runs(whole, result, runs / whole.name))


def _of_noise(experiment: Experiment) -> Iterator[Block]:
    """What the noise of private training costs; a line as soon as it is known."""
    from fedshift.experiment.check import noise_costs
    from fedshift.report.check_words import Line

    for cost in noise_costs(experiment):
        what = f"{cost.method} → {cost.target}, seed {experiment.protocol.seeds[0]}"
        yield Line(f"{what}: {cost.private:.2f} % with noise, {cost.plain:.2f} % without")
