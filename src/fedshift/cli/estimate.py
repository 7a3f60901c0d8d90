"""``fedshift estimate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedshift.cli.predict import table_format
from fedshift.errors import UserError, nearest
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
    print(printable(str(estimate), keep="\n"))
