"""``fedshift check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedshift.cli.console import safe_console
from fedshift.cli.many_sites import domain_table, missing_cells_of, privacy_rows, unlike, without_labels
from fedshift.errors import UserError
from fedshift.experiment.check import Check, MethodCheck, check, noise_costs
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.experiment.runs.run_folder import check_place
from fedshift.report.folding import Folded
from fedshift.report.steps import steps_in_words
from fedshift.text import listed

_MOST_COLUMNS = 20
"""Columns whose missing cells are listed."""
_LONG = 2.0
"""Hours of training on a processor from which a frozen network is named."""


@dataclass(frozen=True)
class _Line:
    """A line of the output. ``whole``: it is broken by no width, so that it is one line in a file, too."""

    text: str
    whole: bool = True


_Block = _Line | Folded


def check_file(path: Path, overrides: Sequence[str], runs: Path = Path("runs"), *, noise_cost: bool = False) -> None:
    """Print what is known about an experiment before it trains, and what of it is finished in the folder ``runs``.

    ``noise_cost``: also train with and without noise, and print the accuracies.
    """
    experiment = load(path, overrides)
    found = check(experiment, runs)
    console = safe_console()
    parts = (
        _of_data(found),
        _of_model(found),
        _of_methods(experiment, found),
        _of_privacy(found),
        _of_noise(experiment) if noise_cost else (),
        _of_runs(experiment, found, runs / experiment.name),
    )
    for block in chain.from_iterable(parts):
        if isinstance(block, _Line):
            console.print(block.text, markup=False, highlight=False, soft_wrap=block.whole)
        else:
            console.print(block)


def _of_data(found: Check) -> Iterator[_Block]:
    """The data set and its domains."""
    shape = "×".join(str(size) for size in found.input_shape)
    yield _Line(f"data {found.data} ({found.fingerprint}): {found.learned}, samples of {shape}", whole=False)
    yield domain_table(found.domains)
    yield from map(_Line, unlike(found.domains))
    if fixed := [one.name for one in found.domains if one.fixed_split]:
        yield _Line(f"test samples fixed by data.split, not by protocol.test_fraction: {listed(fixed)}")
    yield from map(_Line, without_labels(found.domains))
    yield from map(_Line, _missing(found))


def _of_model(found: Check) -> Iterator[_Block]:
    """The network, and what runs it."""
    yield _Line(
        f"model {found.model}: {found.parameters:,} parameters, {found.payload:,} bytes; on {found.device}, "
        f"{found.threads} thread(s) per process",
        whole=False,
    )
    for sentence in found.found:
        yield _Line(f"  {sentence}")


def _of_methods(experiment: Experiment, found: Check) -> Iterator[_Block]:
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
        for method in found.methods
    ]
    yield Folded(columns, methods, words=(len(columns) - 2, len(columns) - 1))
    yield _Line(
        f"training of all runs, measuring included: about {_duration(sum(method.hours for method in found.methods))}; "
        "starting and saving add to this",
        whole=False,
    )
    if (slow := _faster(experiment, found)) is not None:
        yield _Line(slow)
    if (drawn := experiment.protocol.sites_per_round) is not None:
        number = f"{drawn}" if isinstance(drawn, int) else f"{drawn:g} of the"
        yield _Line(f"{number} sources are drawn for each round; mini-batches and bytes count only these")
    if (why := _why_rounds_differ(found.methods)) is not None:
        yield _Line(why, whole=False)
    steps = steps_in_words({method.label: method.steps for method in found.methods if method.steps is not None})
    if steps is not None:
        yield _Line(steps)


def _of_privacy(found: Check) -> Iterator[_Block]:
    """The ε that each site spends."""
    if found.privacy:
        delta = next(iter(found.privacy.values())).delta
        sites = privacy_rows({site: (spent.run, spent.together) for site, spent in found.privacy.items()})
        yield Folded(["site", f"ε of a run at δ = {delta:g}", "ε of all runs together"], sites)


def _of_noise(experiment: Experiment) -> Iterator[_Block]:
    """What the noise of private training costs; a line as soon as it is known."""
    for cost in noise_costs(experiment):
        what = f"{cost.method} → {cost.target}, seed {experiment.protocol.seeds[0]}"
        yield _Line(f"{what}: {cost.private:.2f} % with noise, {cost.plain:.2f} % without")


def _of_runs(experiment: Experiment, found: Check, place: Path) -> Iterator[_Block]:
    """What is finished, what is sent before training, and warnings."""
    progress = found.progress
    if progress.finished or progress.others or progress.refused:
        others = f"; {progress.others} more in this folder are not of this experiment" if progress.others else ""
        yield _Line(f"{place}: {progress.finished} of {progress.planned} runs are finished{others}")
    for kind in found.encoding_shares:
        yield _Line(f"before training, each source sends {kind}, from which all sites get one encoding", whole=False)
    refused = () if progress.refused is None else (f"fedshift run will refuse to start: {progress.refused}",)
    for warning in (*found.warnings, *(refused or _place(experiment, place))):
        yield _Line(f"warning: {warning}")


def _faster(experiment: Experiment, found: Check) -> str | None:
    """That a frozen backbone takes far less, where training a pre-trained network takes hours on a processor."""
    hours, weights = sum(method.hours for method in found.methods), getattr(experiment.model, "pretrained", False)
    if found.device != "cpu" or hours < _LONG or not weights or ":" in experiment.model.name:
        return None
    given = "true" if weights is True else weights
    return (
        "much less with the features of a frozen network, computed once: model: {name: frozen, backbone: "
        f"{{name: {experiment.model.name}, pretrained: {given}}}}}; or on a GPU"
    )


def _missing(found: Check) -> Iterator[str]:
    """How many cells of each column are missing at each site, before they are filled; those with most first."""
    columns = sorted(found.missing.items(), key=lambda column: -sum(absent for absent, _ in column[1].values()))
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


def _place(experiment: Experiment, folder: Path) -> Iterator[str]:
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
