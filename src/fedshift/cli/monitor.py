"""``fedshift monitor``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.arguments import OwnMethod, OwnNetwork, RunOrModel, TextOrJson, Written, check_format
from fedshift.text import json_text, printable

if TYPE_CHECKING:
    from fedshift.experiment.monitor import Month


def monitor(
    run: RunOrModel,
    data: Annotated[Path, typer.Argument(help="The samples of a new month: as for predict.", metavar="DATA")],
    overrides: Written = None,
    log: Annotated[Path, typer.Option("--log", help="A line for each month.", metavar="FILE")] = Path("monitor.jsonl"),
    month: Annotated[str | None, typer.Option("--month", help="Its name in the log. [its number]")] = None,
    alarms: Annotated[
        float, typer.Option("--alarms", help="Share of unchanged months that may be called a drift.")
    ] = 0.01,
    baseline: Annotated[int, typer.Option("--baseline", min=1, help="First months, to compare others with.")] = 3,
    format: TextOrJson = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Compare a new month's samples with the training data and the first months; exit code 1 if somebody should look.

    Each month adds a line of sums to the log: no sample, no name of one. 0: no alarm; 2: a mistake in what was given.
    """
    from fedshift.cli.predict import table_format
    from fedshift.experiment import monitor as months
    from fedshift.experiment.predict import load_model

    check_format(format)
    written = table_format(overrides or [], "monitor")
    trained, folder = load_model(run, method, network), run if run.is_dir() else run.parent
    looked_at = months.monitor(trained, folder, data, log, month, alarms=alarms, baseline=baseline, written=written)
    if format == "json":
        print(json_text({**looked_at.model_dump(mode="json"), "alarm": looked_at.alarm}, indent=2))
    else:
        for line in _lines(looked_at):
            print(printable(line))
    if looked_at.alarm:
        raise typer.Exit(1)


def _lines(month: Month) -> Iterator[str]:
    from fedshift.evaluation.estimate.combination import LEVEL
    from fedshift.experiment.monitor import FEWEST

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
