"""The papers' tables and figures: ours beside the published numbers.

``python benchmarks/papers.py list`` names them, ``… table NAME`` and ``… figure NAME`` run what is unfinished behind
one, and compare or draw it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.main
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshift.cli import exit_code
from fedshift.cli.console import safe_console
from fedshift.cli.run import reporter_at
from fedshift.deploy.cli.audit import audit_file
from fedshift.errors import UserError
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.files import write_bytes
from fedshift.report.differences import p_value
from fedshift.report.folding import Folded
from fedshift.report.measures import MISSING
from paper_tables import distances, placements
from paper_tables.catalogue import Catalogue, Entry, Source, read
from paper_tables.comparison import Compared, Gain, Number, Runs, compare_panel
from paper_tables.drawing import ours_and_published, svg_file
from paper_tables.panels import csv_of, panels_of

app = typer.Typer(
    help="The papers' tables and figures, ours beside the published.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Folder = Annotated[Path, typer.Option("--folder", help="A folder with a papers.yaml.", metavar="DIR")]
HERE = Path(__file__).parent


@app.command("list")
def show_list(folder: Folder = HERE) -> None:
    """List every table and figure, how far its experiments are, what is missing."""
    catalogue, console = read(folder), safe_console()
    for paper in dict.fromkeys(entry.paper for entry in catalogue.entries):
        table = Table(
            box=None, pad_edge=False, title=paper, title_justify="left", title_style="bold", show_header=False
        )
        table.add_column(no_wrap=True)  # a name is typed after `table` and `figure`
        table.add_column(overflow="fold")
        for entry in catalogue.entries:
            if entry.paper == paper:
                states = [catalogue.state(source) for source in entry.experiments]
                lines = [f"{state.experiment.name}: {state.text}" for state in states] or ["cannot run here"]
                lines += [f"differs: {entry.instead}"] if entry.instead else []
                lines += [f"missing: {entry.missing}"] if entry.missing else []
                table.add_row(Text(entry.name), Text("\n".join((entry.shows, *lines))))
        console.print(table)
        console.print()


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="The name of a table or figure.", metavar="NAME")],
    folder: Folder = HERE,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run what is unfinished, or only compare.")] = True,
) -> None:
    """Run the experiments behind a table or figure and print ours beside the published.

    Example: python benchmarks/papers.py table kd3a-table-8 --no-run
    """
    catalogue, console = read(folder), safe_console()
    entry = catalogue.entry(name)
    if run and entry.experiments:
        _run(catalogue, entry)
    runs = Runs(catalogue, entry)
    console.print(Text(f"{entry.paper}, {entry.shows}", style="bold"))
    for source in entry.experiments:
        state = catalogue.state(source)
        console.print(Text(f"{state.experiment.name}: {state.text}", style="dim"))
    if entry.instead:
        console.print(Text(entry.instead, style="dim"))
    for panel in entry.panels:
        if panel.kind == "cells":
            numbers = compare_panel(catalogue, panel, runs)
            if panel.title:
                console.print(Text(panel.title, style="italic"))
            console.print(_table(numbers))
            for line in _below(numbers):
                console.print(Text(line))
        else:
            console.print(Text(f"{panel.title or panel.kind}: drawn by papers.py figure {name}"))
    if entry.missing:
        if run and not entry.experiments:
            raise UserError(f"{name} cannot run: {entry.missing}")
        console.print(Text(entry.missing))


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="The name of a table or figure.", metavar="NAME")],
    folder: Folder = HERE,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run first what is unfinished.")] = True,
    out: Annotated[Path, typer.Option("--out", help="Folder of NAME.svg and NAME.csv.", metavar="DIR")] = Path("."),
) -> None:
    """Run what is unfinished behind a table or figure; draw ours beside the published, and write a CSV.

    Example: python benchmarks/papers.py figure csac-figure-6 --out figures
    """
    catalogue = read(folder)
    entry = catalogue.entry(name)
    if run and entry.experiments:
        _run(catalogue, entry)
    panels = panels_of(catalogue, entry)
    sources = [str(catalogue.published[panel.published]["source"]) for panel in entry.panels if panel.published]
    beside = f"Published: {'; '.join(dict.fromkeys(sources))}." if sources else ""
    drawing = ours_and_published(panels, f"{name}. {entry.instead} {beside}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {out}: {error.strerror or error}") from None
    for file, data in ((out / f"{name}.svg", svg_file(drawing)), (out / f"{name}.csv", csv_of(panels).encode())):
        write_bytes(file, data)
        safe_console(stderr=True).print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


def _run(catalogue: Catalogue, entry: Entry) -> None:
    """Run what is unfinished, one experiment after the other."""
    errors = safe_console(stderr=True)
    states = [(source, catalogue.state(source)) for source in entry.experiments]
    lacking = next((state for _, state in states if state.absent), None)
    if lacking is not None:
        raise UserError(
            f"{entry.name} cannot run: {lacking.experiment.name} needs {lacking.absent} "
            f"(fedshift datasets {lacking.experiment.data.name}); --no-run compares what is finished"
        )
    for source, state in states:
        if not state.done:
            errors.print(f"{state.experiment.name}: {state.text}", markup=False, highlight=False)
            _carry_on(catalogue, source, errors)
            kinds = {panel.kind for panel in entry.panels}
            if "distances" in kinds:
                distances.measure(catalogue.results / state.experiment.name)
            if "features" in kinds:
                placements.measure(catalogue.results / state.experiment.name, state.experiment)


def _carry_on(catalogue: Catalogue, source: Source, errors: Console) -> None:
    experiment = catalogue.experiment(source)
    if source.audit_iterations:
        folder = catalogue.results / experiment.name
        iterations = source.audit_iterations
        audit_file(catalogue.file(source), source.set, folder, batches=(1, 4, 8), iterations=iterations)
        return
    reporter, stop = reporter_at(errors)
    try:
        run_experiment(experiment, catalogue.results, reporter)
    except KeyboardInterrupt:
        errors.print("interrupted: the same command continues after the last round", highlight=False)
        sys.exit(130)
    finally:
        stop()


def _table(compared: Compared) -> Folded:
    """Three lines a row: ours, published, and the difference where the data are the paper's."""
    panel = compared.panel
    rows: list[list[str]] = []
    for row in panel.rows:
        ours = [compared.ours.get((row, column)) for column in panel.columns]
        printed = [compared.published.get((row, column)) for column in panel.columns]
        lines = [("ours", [_in_words(number) for number in ours])] if compared.ours else []
        if any(printed):
            lines.append(("published", [_in_words(number) for number in printed]))
        if any(printed) and compared.ours and panel.comparable:
            both = zip(ours, printed, strict=True)
            lines.append(("difference", [f"{a.mean - b.mean:+.2f}" if a and b else MISSING for a, b in both]))
        rows += [["" if number else row, kind, *cells] for number, (kind, cells) in enumerate(lines)]
    return Folded(["", "", *panel.columns], rows, names=2)


def _in_words(number: Number | None) -> str:
    if number is None:
        return MISSING
    return f"{number.mean:.2f}" + ("" if number.error is None else f" ±{number.error:.2f}")


def _below(compared: Compared) -> list[str]:
    """The sentences below a table."""
    baseline = compared.panel.baseline
    lines = [f"{gain.row} over {baseline}, average over targets: {_gain(gain)}" for gain in compared.gains]
    if compared.source:
        lines.append(f"published: {compared.source}")
    if compared.others:
        lines.append(f"published rows that are not shown: {', '.join(compared.others)}")
    if any(gain.here and gain.here.p is not None for gain in compared.gains):
        lines.append(
            "p: a mixed model with targets as clusters; p here: over seeds, of these targets only; one line at a time, "
            "not corrected for their number"
        )
    return lines


def _gain(gain: Gain) -> str:
    parts = []
    if gain.ours is not None:
        n, here = (gain.here.n, gain.here.p) if gain.here is not None else (0, None)
        p = "" if gain.ours is gain.here or gain.ours.p is None else f", p {p_value(gain.ours.p)}"
        p += "" if here is None else f", p here {p_value(here)}"
        seeds = "1 seed" if n == 1 else f"{n} seeds"
        parts.append(f"ours {gain.ours.mean:+.2f} ({seeds}{p})")
    if gain.published is not None:
        parts.append(f"published {gain.published:+.2f}")
    return ", ".join(parts)


def main() -> None:
    """Run the command line."""
    sys.exit(exit_code("papers.py", lambda: typer.main.get_command(app)))


if __name__ == "__main__":
    main()
