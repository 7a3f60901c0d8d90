"""What is known of an experiment before it trains, in words and tables: for the terminal, and for ``print``."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedshift.errors import UserError
from fedshift.experiment.check import Check, DomainCheck, MethodCheck
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.runs.run_folder import check_place
from fedshift.report.conditions import steps_in_words
from fedshift.report.folding import Folded
from fedshift.text import join_names, printable, size_in_words

FEW = 20
"""So many sites have a row each."""
_NUMBERS: Mapping[str, Callable[[DomainCheck], int]] = {
    "samples": lambda domain: domain.samples,
    "trains": lambda domain: domain.train,
    "held out": lambda domain: domain.held_out,
    "measured as target": lambda domain: domain.measured_as_target,
}


def domain_table(domains: Sequence[DomainCheck]) -> Folded:
    """A row for each domain; of many the fewest, the median and the most samples of any."""
    if len(domains) <= FEW:
        rows = [
            [domain.name, *(str(of(domain)) for of in _NUMBERS.values()), ", ".join(domain.missing)]
            for domain in domains
        ]
        return Folded(("domain", *_NUMBERS, "without samples of"), rows, words=(len(_NUMBERS) + 1,))
    columns = [[of(domain) for domain in domains] for of in _NUMBERS.values()]
    parts: dict[str, Callable[[list[int]], int]] = {"fewest": min, "median": statistics.median_low, "most": max}
    return Folded(
        (f"{len(domains)} domains", *_NUMBERS),
        [[name, *(str(part(column)) for column in columns)] for name, part in parts.items()],
    )


def unlike(domains: Sequence[DomainCheck]) -> Iterator[str]:
    """What the rows of few domains show and those of many do not: who has the fewest samples, or none of a class."""
    if len(domains) <= FEW:
        return
    for heading in ("samples", "held out"):
        of = _NUMBERS[heading]
        numbers = [of(domain) for domain in domains if of(domain)]
        fewest = min(numbers, default=0)
        if numbers and fewest < max(numbers):
            with_fewest = [domain.name for domain in domains if of(domain) == fewest]
            yield f"  fewest {heading}, {fewest}: {join_names(with_fewest)}"
    without: dict[str, Callable[[DomainCheck], bool]] = {
        "that do not train": lambda domain: domain.train == 0,
        "that hold nothing out": lambda domain: domain.train > 0 and domain.held_out == 0,
    }
    for what, holds in without.items():
        if names := [domain.name for domain in domains if holds(domain)]:
            yield f"  {what}: {join_names(names)}"
    for name in dict.fromkeys(name for domain in domains for name in domain.missing):
        lacking = [domain.name for domain in domains if name in domain.missing]
        yield f"  without samples of {name}: {join_names(lacking)}"


def without_labels(domains: Sequence[DomainCheck]) -> Iterator[str]:
    """Where samples have no label, and how many: a line for each of a few domains, or one for all."""
    lacking = [domain for domain in domains if domain.without_label]
    if len(lacking) <= FEW:
        for domain in lacking:
            what = (
                "not measured"
                if domain.without_label == domain.samples
                else f"{domain.measured_as_target} samples measured"
            )
            yield f"{domain.name}: {domain.without_label} samples without labels, which no source trains on; {what}"
        return
    samples = sum(domain.without_label for domain in lacking)
    names = join_names([domain.name for domain in lacking])
    yield f"{samples} samples without labels, which no source trains on: {names}"
    if bare := [domain.name for domain in lacking if domain.without_label == domain.samples]:
        yield f"not measured, without any label: {join_names(bare)}"


def missing_cells_of(column: str, sites: Mapping[str, tuple[int, int]]) -> str:
    """How many cells of a column are missing at each site; of many sites those with the largest shares.

    ``sites``: site → its missing cells and its rows.
    """
    some = {site: counts for site, counts in sites.items() if counts[0]}
    shown = sorted(some, key=lambda site: -some[site][0] / some[site][1]) if len(some) > FEW else [*some]
    counts = join_names([f"{site} {some[site][0]} of {some[site][1]}" for site in shown])
    if len(some) <= FEW:
        return f"missing in column {column}: {counts}"
    cells, rows = sum(cells_missing for cells_missing, _ in sites.values()), sum(whole for _, whole in sites.values())
    return f"missing in column {column}: {cells} of {rows} at {len(some)} of {len(sites)} sites; most at {counts}"


def privacy_rows(spent: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """ε of a run and of all runs for each site; of many, where they are least and most. ``spent``: site → both."""
    if len(spent) > FEW:
        least, most = min(spent, key=lambda site: spent[site]), max(spent, key=lambda site: spent[site])
        spent = {f"{len(spent)} sites, least ({least})": spent[least], f"most ({most})": spent[most]}
    return [[site, *(f"{epsilon:.2f}" for epsilon in both)] for site, both in spent.items()]


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
            "unknown" if method.bytes_up is None else size_in_words(method.bytes_up),
            "unknown" if method.bytes_down is None else size_in_words(method.bytes_down),
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
