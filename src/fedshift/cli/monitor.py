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
    own_code: tuple[str | None, str | None] = (None, None),
    overrides: Sequence[str] = (),
) -> None:
    """Look at a new month's samples, append a line to the log and print it. The exit code is 1 if it is an alarm.

    Raises:
        UserError: the format, the model, the data or the log cannot be used.
    """
    if format not in _FORMATS:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, _FORMATS)}")
    written = table_format(overrides, "monitor")
    looked_at = monitor(
        load_model(run, *own_code),
        run if run.is_dir() else run.parent,
        data,
        log,
        month,
        alarms=alarms,
        baseline=baseline,
        written=written,
    )
    if format == "json":
        print(json_text({**looked_at.model_dump(mode="json"), "alarm": looked_at.alarm}, indent=2))
    else:
        for line in _lines(looked_at):
            print(printable(line))
    if looked_at.alarm:
        raise typer.Exit(1)


def _lines(month: Month) -> Iterator[str]:
    role = ", with which later ones are compared" if month.reference else ""
    yield f"month {month.month}: {month.samples} samples{role}"
    if not month.answers:
        yield f"note: less than {FEWEST} samples say too little, so nothing but their number is noted"
        return
    if month.estimate is None:
        yield "no estimate of the accuracy: fedshift estimate says why"
    else:
        ends = f"{month.low:.1f} to {month.high:.1f} in {LEVEL:.0%} of cases"
        yield f"accuracy, estimated: {month.estimate:.1f} % ({ends})"
    for name in month.unlike:
        yield f"warning: {name} is too unlike the training data to predict; fedshift predict says in what"
    for name in (name for name in month.unusual if name not in month.unlike):
        yield f"note: {name} is unlike the training data"
    if month.harmful:
        yield "warning: the model may do much worse here than where it was measured; have some samples labelled"
    for what, p in month.drift.items():
        yield f"warning: compared with the first months, other {what} (p = {p:.1g})"
    if not month.alarm:
        yield "no alarm"
