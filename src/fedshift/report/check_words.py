"""What is known of an experiment before it trains, in words and tables: for the terminal, and for ``print``."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedshift.errors import UserError
from fedshift.experiment.check import Check, MethodCheck
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.runs.run_folder import check_place
from fedshift.report.folding import Folded
from fedshift.report.many_sites import domain_table, missing_cells_of, privacy_rows, unlike, without_labels
from fedshift.report.pooled_steps import steps_in_words
from fedshift.text import join_names, printable

_MOST_COLUMNS = 20
"""Columns whose missing cells are listed."""
_LONG = 2.0
"""Hours of training on a processor from which a frozen network is named."""
_WIDTH = 120
"""Characters of a line of the text."""


@dataclass(frozen=True)
class Line:
    """A line of the output. ``whole``: it is broken by no width, so that it is one line in a file, too."""

    text: str
    whole: bool = True


Block = Line | Folded


def of_plan(experiment: Experiment, check: Check) -> Iterator[Block]:
    """Of data, network, methods and privacy."""
    yield from _of_data(check)
    yield from _of_model(check)
    yield from _of_methods(experiment, check)
    yield from _of_privacy(check)


def print_blocks(console: Console, blocks: Iterator[Block]) -> None:
    """Print them, each as soon as it is there."""
    for block in blocks:
        if isinstance(block, Line):
            console.print(block.text, markup=False, highlight=False, soft_wrap=block.whole)
        else:
            console.print(block)


def check_text(experiment: Experiment, check: Check, runs: Path) -> str:
    """All of it as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH)
    print_blocks(console, of_plan(experiment, check))
    print_blocks(console, of_runs(experiment, check, runs / experiment.name))
    assert isinstance(console.file, io.StringIO)
    return printable(console.file.getvalue(), keep="\n").rstrip()


def _of_data(check: Check) -> Iterator[Block]:
    """The data set and its domains."""
    shape = "×".join(str(size) for size in check.input_shape)
    yield Line(f"data {check.data} ({check.fingerprint}): {check.learned}, samples of {shape}", whole=False)
    yield domain_table(check.domains)
    yield from map(Line, unlike(check.domains))
    if fixed := [domain.name for domain in check.domains if domain.fixed_split]:
        yield Line(f"test samples fixed by data.split, not by protocol.test_fraction: {join_names(fixed)}")
    yield from map(Line, without_labels(check.domains))
    yield from map(Line, _missing(check))


def _of_model(check: Check) -> Iterator[Block]:
    """The network, and what runs it."""
    yield Line(
        f"model {check.model}: {check.parameters:,} parameters, {check.payload:,} bytes; on {check.device}, "
        f"{check.threads} thread(s) per process",
        whole=False,
    )
    for sentence in check.model_notes:
        yield Line(f"  {sentence}")


def _of_methods(experiment: Experiment, check: Check) -> Iterator[Block]:
    """What each method trains and sends, and how long all take."""
    columns = (
        "method",
        "runs",
        "rounds",
        "mini-batches per site",
        "training",
        "up",
        "down",
        "leaves a site",
        "server reads",
    )
    methods = [
        [
            method.label,
            str(method.runs),
            str(method.rounds),
            str(method.mini_batches_per_site),
            _duration(method.hours),
            _size(method.bytes_up),
            _size(method.bytes_down),
            ", ".join(method.shares),
            method.reads,
        ]
        for method in check.methods
    ]
    yield Folded(columns, methods, words=(len(columns) - 2, len(columns) - 1))
    yield Line(
        f"training of all runs, measuring included: about {_duration(sum(method.hours for method in check.methods))}; "
        "starting and saving add to this",
        whole=False,
    )
    if (slow := _faster(experiment, check)) is not None:
        yield Line(slow)
    if (drawn := experiment.protocol.sites_per_round) is not None:
        number = f"{drawn}" if isinstance(drawn, int) else f"{drawn:g} of the"
        yield Line(f"{number} sources are drawn for each round; mini-batches and bytes count only these")
    if (why := _why_rounds_differ(check.methods)) is not None:
        yield Line(why, whole=False)
    steps = steps_in_words({method.label: method.steps for method in check.methods if method.steps is not None})
    if steps is not None:
        yield Line(steps)


def _of_privacy(check: Check) -> Iterator[Block]:
    """The ε that each site spends."""
    if check.privacy:
        delta = next(iter(check.privacy.values())).delta
        sites = privacy_rows({site: (spent.run, spent.together) for site, spent in check.privacy.items()})
        yield Folded(["site", f"ε of a run at δ = {delta:g}", "ε of all runs together"], sites)


def of_runs(experiment: Experiment, check: Check, folder: Path) -> Iterator[Block]:
    """What is finished, what is sent before training, and warnings."""
    progress = check.progress
    if progress.finished or progress.others or progress.refused:
        others = f"; {progress.others} more in this folder are not of this experiment" if progress.others else ""
        yield Line(f"{folder}: {progress.finished} of {progress.planned} runs are finished{others}")
    for kind in check.encoding_shares:
        yield Line(f"before training, each source sends {kind}, from which all sites get one encoding", whole=False)
    refused = () if progress.refused is None else (f"fedshift run will refuse to start: {progress.refused}",)
    for warning in (*check.warnings, *(refused or _check_folder(experiment, folder))):
        yield Line(f"warning: {warning}")


def _faster(experiment: Experiment, check: Check) -> str | None:
    """That a frozen backbone takes far less, where training a pre-trained network takes hours on a processor."""
    hours, weights = sum(method.hours for method in check.methods), getattr(experiment.model, "pretrained", False)
    if check.device != "cpu" or hours < _LONG or not weights or ":" in experiment.model.name:
        return None
    given = "true" if weights is True else weights
    return (
        "much less with the features of a frozen network, computed once: model: {name: frozen, backbone: "
        f"{{name: {experiment.model.name}, pretrained: {given}}}}}; or on a GPU"
    )


def _missing(check: Check) -> Iterator[str]:
    """How many cells of each column are missing at each site, before they are filled; those with most first."""
    columns = sorted(check.missing.items(), key=lambda column: -sum(absent for absent, _ in column[1].values()))
    for name, sites in columns[:_MOST_COLUMNS]:
        yield missing_cells_of(name, sites)
    if len(columns) > _MOST_COLUMNS:
        yield f"missing in {len(columns) - _MOST_COLUMNS} more columns"


def _why_rounds_differ(methods: Sequence[MethodCheck]) -> str | None:
    """Why methods have different numbers of rounds; None if they have not."""
    if len({method.rounds for method in methods}) == 1:
        return None
    per_round = ", ".join(f"{method.label} {method.mini_batches_per_round:.4g}" for method in methods)
    return (
        "rounds differ because every method trains on the same number of mini-batches, as many as the most demanding "
        f"one needs in training.rounds rounds; mini-batches per site in a round: {per_round}"
    )


def _check_folder(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Warns if runs in ``folder`` have other settings."""
    try:
        check_place(experiment, folder)
    except UserError as error:
        yield f"fedshift run will refuse to start: {error}"


def _duration(hours: float) -> str:
    """A duration in hours, minutes or seconds, whichever is at least 1."""
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"


def _size(number: float | None) -> str:
    if number is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
