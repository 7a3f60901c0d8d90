"""``fedshift estimate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedshift.cli.predict import table_format
from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.combination import LEVEL, Estimate
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.experiment.estimate import estimate_at
from fedshift.experiment.predict import load_model
from fedshift.text import json_text, printable

_FORMATS = ("terminal", "json")


def print_estimate(
    run: Path,
    data: Path,
    format: str,
    own_method: str | None,
    own_network: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Print how well a run's model will do on samples without labels, or why that cannot be said.

    Raises:
        UserError: the format, the model or the data cannot be used.
    """
    if format not in _FORMATS:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, _FORMATS)}")
    written = table_format(overrides, "estimate")
    trained = load_model(run, own_method, own_network)
    estimate = estimate_at(trained, run if run.is_dir() else run.parent, data, written)
    if format == "json":
        print(json_text(estimate.plain(), indent=2))
        return
    for line in _lines(estimate):
        print(printable(line))


def _lines(estimate: Estimate) -> Iterator[str]:
    if estimate.estimate is None:
        yield "no estimate: " + estimate.reasons[0]
    else:
        ends = f"{estimate.low:.1f} to {estimate.high:.1f} in {LEVEL:.0%} of cases"
        yield f"accuracy here, estimated: {estimate.estimate:.1f} % ({ends})"
    for name, one in estimate.measures.items():
        at = "" if name == "auroc" else f" at threshold {estimate.threshold:.2f}"
        title = f"{ENTRIES[name].title}{at}"
        if one.estimate is None:
            yield f"{title}: no estimate: {one.reason}"
        else:
            yield f"{title}, estimated: {one.estimate:.1f} % ({one.low:.1f} to {one.high:.1f})"
    if estimate.usual is not None:
        sites = f"{estimate.sites} site" + ("s" if estimate.sites > 1 else "")
        yield f"accuracy where it was measured: {estimate.usual:.1f} % (mean of {sites}, each left out in turn)"
    if estimate.harmful:
        yield "warning: the data differ so much that the model may do much worse here; have some samples labelled first"
    if estimate.looked_at:
        yield (
            "note: samples of the left-out sites were looked at again; page, tables and verdict rest on scores alone "
            "and may say another number: take this one"
        )
    for reason in estimate.reasons[1 if estimate.abstain else 0 :]:
        yield f"note: {reason}"
    if estimate.parts:
        yield "single estimators: " + ", ".join(f"{name} {value:.1f}" for name, value in estimate.parts.items())
