"""``fedshift predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedshift.cli.arguments import OwnMethod, OwnNetwork, RunOrModel, Written, check_format
from fedshift.cli.console import safe_console
from fedshift.errors import UserError
from fedshift.text import csv_text, json_text, printable

if TYPE_CHECKING:
    from fedshift.data.table_files import SiteFormat


def _warn(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr)


def table_format(overrides: Sequence[str], command: str) -> SiteFormat | None:
    """How a table is written, by ``data.FIELD=VALUE`` of a command line; None if nothing is said.

    UserError if there is no such field, or its value does not fit.
    """
    from fedshift.experiment.config.experiment_file import override_field
    from fedshift.experiment.predict import how_written

    options: dict[str, Any] = {}
    for override in overrides:
        if not override.startswith("data."):
            raise UserError(f"'{override}': {command} takes data.FIELD=VALUE, how a table is written: data.decimal=,")
        override_field(options, override)
    return how_written(options.get("data", {}))


def predict(
    model: RunOrModel,
    data: Annotated[Path, typer.Argument(help="An image, a folder of images, an .npz or a table.", metavar="DATA")],
    overrides: Written = None,
    format: Annotated[str, typer.Option("--format", help="terminal, csv or json.")] = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
    masks: Annotated[
        Path | None, typer.Option("--masks", help="Segmentation: the folder for the predicted masks.")
    ] = None,
    accept_shift: Annotated[
        bool, typer.Option("--accept-shift", help="Predict also data that look nothing like the training data.")
    ] = False,
) -> None:
    """Predict with a trained model. Warns of data that look unlike its training data; refuses what is too far off."""
    from fedshift.experiment.handing_out import check_adapted
    from fedshift.experiment.predict import load_model
    from fedshift.report.folding import Folded

    check_format(format, ("terminal", "csv", "json"))
    written = table_format(overrides or [], "predict")
    trained = load_model(model, method, network)
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
