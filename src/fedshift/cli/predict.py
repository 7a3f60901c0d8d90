"""``fedshift predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.cli.console import safe_console
from fedshift.data.table_files import SiteFormat
from fedshift.errors import UserError, nearest
from fedshift.experiment.config.experiment_file import override_field
from fedshift.experiment.handing_out import check_adapted
from fedshift.experiment.predict import how_written, load_model
from fedshift.report.folding import Folded
from fedshift.text import csv_text, json_text, printable

_FORMATS = ("terminal", "csv", "json")


def _warn(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr)


def table_format(overrides: Sequence[str], command: str) -> SiteFormat | None:
    """How a table is written, by ``data.FIELD=VALUE`` of a command line; None if nothing is said.

    Raises:
        UserError: there is no such field, or its value does not fit.
    """
    options: dict[str, Any] = {}
    for override in overrides:
        if not override.startswith("data."):
            raise UserError(f"'{override}': {command} takes data.FIELD=VALUE, how a table is written: data.decimal=,")
        override_field(options, override)
    return how_written(options.get("data", {}))


def print_predictions(
    model: Path,
    data: Path,
    format: str,
    own_method: str | None,
    masks: Path | None = None,
    own_network: str | None = None,
    accept_shift: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Print a prediction per sample. With ``masks``, write the predicted masks there and print a line per file.

    What is unusual about the data goes to standard error. With ``accept_shift`` they are predicted however unusual.
    ``overrides`` say how a table is written, such as ``data.decimal=,``.

    Raises:
        UserError: the format, the model or the data cannot be used.
    """
    if format not in _FORMATS:
        raise UserError(f"--format: there is no format '{format}'; {nearest(format, _FORMATS)}")
    written = table_format(overrides, "predict")
    trained = load_model(model, own_method, own_network)
    check_adapted(trained, model if model.is_dir() else model.parent, accept=accept_shift)
    if masks is not None:
        if written is not None:
            raise UserError("data.… says how tables are written, and --masks needs images")
        for file, share in trained.write_masks(data, masks, accept_shift=accept_shift, warn=_warn):
            print(printable(f"{file}: {100 * share:.1f} % of the image"))
        return
    predictions = trained.predict(data, accept_shift=accept_shift, warn=_warn, written=written)
    labelled = any(p.label is not None for p in predictions)
    if format == "json":
        described = [
            {
                "name": p.name,
                **({"label": p.label} if labelled else {}),
                "predicted": p.predicted,
                **(
                    {"probabilities": dict(zip(trained.classes, p.probabilities, strict=True))}
                    if p.probabilities
                    else {}
                ),
            }
            for p in predictions
        ]
        print(json_text(described, indent=2))
    elif format == "csv":
        rows = [
            [
                p.name,
                *([p.label or ""] if labelled else []),
                str(p.predicted),
                *(f"{value:.6f}" for value in p.probabilities),
            ]
            for p in predictions
        ]
        head = ["name", *(["label"] if labelled else []), "predicted"]
        names = trained.classes if trained.objective.has_probabilities else ()
        sys.stdout.write(csv_text([[*head, *names], *rows]))
    else:
        head = ["sample", *(["label"] if labelled else []), "predicted", "probability"]
        if not trained.objective.has_probabilities:
            head = [*head[:-2], trained.objective.describe(trained.classes)]
        rows = []
        for p in predictions:
            label = [p.label or ""] if labelled else []
            text = f"{p.predicted:.6g}" if isinstance(p.predicted, float) else p.predicted
            rows.append([p.name, *label, text, *([f"{max(p.probabilities):.3f}"] if p.probabilities else [])])
        safe_console().print(Folded(head, rows, words=range(1, len(head))))
