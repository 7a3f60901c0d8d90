"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.", metavar="DIR")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set, such as training.rounds=10.", metavar="[KEY.PATH=VALUE]...")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Trust the code of your own that it names; it is shown, and remembered.")
]
