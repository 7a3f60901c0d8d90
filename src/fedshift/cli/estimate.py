"""``fedshift estimate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedshift.cli.predict import table_format
from fedshift.errors import UserError, nearest
from fedshift.evaluation.estimate.combination import LEVEL, Estimate
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
    found = estimate_at(trained, run if run.is_dir() else run.parent, data, written)
    if format == "json":
        print(json_text(found.plain(), indent=2))
        return
    for line in _lines(found):
        print(printable(line))


def _lines(found: Estimate) -> Iterator[str]:
    if found.estimate is None:
        yield "no estimate: " + found.reasons[0]
    else:
        ends = f"{found.low:.1f} to {found.high:.1f} in {LEVEL:.0%} of cases"
        yield f"accuracy here, estimated: {found.estimate:.1f} % ({ends})"
    if found.usual is not None:
        sites = f"{found.sites} site" + ("s" if found.sites > 1 else "")
        yield f"accuracy where it was measured: {found.usual:.1f} % (mean of {sites}, each left out in turn)"
    if found.harmful:
        yield "warning: the data differ so much that the model may do much worse here; have some samples labelled first"
    for reason in found.reasons[1 if found.abstain else 0 :]:
        yield f"note: {reason}"
    if found.parts:
        yield "single estimators: " + ", ".join(f"{name} {value:.1f}" for name, value in found.parts.items())
