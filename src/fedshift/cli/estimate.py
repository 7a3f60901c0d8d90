"""``fedshift estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.arguments import OwnMethod, OwnNetwork, TextOrJson, Written, check_format
from fedshift.text import json_text, printable


def estimate(
    run: Annotated[Path, typer.Argument(help="A run's folder, beside those that left out others.", metavar="RUN")],
    data: Annotated[Path, typer.Argument(help="Samples of a new site: as for predict.", metavar="DATA")],
    overrides: Written = None,
    format: TextOrJson = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Estimate a model's accuracy at a site without labels, with an interval; or say why that is not possible."""
    from fedshift.cli.predict import table_format
    from fedshift.experiment.estimate import estimate_at
    from fedshift.experiment.predict import load_model

    check_format(format)
    written = table_format(overrides or [], "estimate")
    answer = estimate_at(load_model(run, method, network), run if run.is_dir() else run.parent, data, written)
    print(json_text(answer.plain(), indent=2) if format == "json" else printable(str(answer), keep="\n"))
