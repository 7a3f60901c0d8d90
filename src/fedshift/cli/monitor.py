"""``fedshift monitor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from fedshift.cli.predict import table_format
from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.combination import LEVEL
from fedshift.experiment.monitor import FEWEST, Month, monitor
from fedshift.experiment.predict import load_model
from fedshift.text import json_text, printable

_FORMATS = ("terminal", "json")


def print_month(
    run: Path,
    data: Path,
    log: Path,
    *,
    month: str | None,
    alarms: float,
    baseline: int,
    format: str,
    own: tuple[str | None, str | None] = (None, None),
    overrides: Sequence[str] = (),
) -> None:
    """Look at a new month's samples, append a line to the log and print it. The exit code is 1 if it is an alarm.

    Raises:
        UserError: the format, the model, the data or the log cannot be used.
    """
    if format not in _FORMATS:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, _FORMATS)}")
    written = table_format(overrides, "monitor")
    found = monitor(
        load_model(run, *own),
        run if run.is_dir() else run.parent,
        data,
        log,
        month,
        alarms=alarms,
        baseline=baseline,
        written=written,
    )
    if format == "json":
        print(json_text({**found.model_dump(mode="json"), "alarm": found.alarm}, indent=2))
    else:
        for line in _lines(found):
            print(printable(line))
    if found.alarm:
        raise typer.Exit(1)


def _lines(found: Month) -> Iterator[str]:
    role = ", with which later ones are compared" if found.reference else ""
    yield f"month {found.month}: {found.samples} samples{role}"
    if not found.answers:
        yield f"note: less than {FEWEST} samples say too little, so nothing but their number is noted"
        return
    if found.estimate is None:
        yield "no estimate of the accuracy: fedshift estimate says why"
    else:
        ends = f"{found.low:.1f} to {found.high:.1f} in {LEVEL:.0%} of cases"
        yield f"accuracy, estimated: {found.estimate:.1f} % ({ends})"
    for name in found.unlike:
        yield f"warning: {name} is too unlike the training data to predict; fedshift predict says in what"
    for name in (name for name in found.unusual if name not in found.unlike):
        yield f"note: {name} is unlike the training data"
    if found.harmful:
        yield "warning: the model may do much worse here than where it was measured; have some samples labelled"
    for what, p in found.drift.items():
        yield f"warning: {what} differ from the first months (p = {p:.1g})"
    if not found.alarm:
        yield "no alarm"
