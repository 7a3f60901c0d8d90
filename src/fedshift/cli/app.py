"""The commands and their options. Each does its work in a file of its own, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="fedshift",
    help="Train one model across sites whose data cannot be pooled and do not look alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.", metavar="DIR")]
ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to set, such as training.rounds=10.", metavar="[KEY.PATH=VALUE]...")
]


@app.command()
def run(experiment: ExperimentFile, overrides: Overrides = None, runs: Runs = Path("runs")) -> None:
    """Run an experiment; run it again to go on where it stopped.

    Example: fedshift run digits.yaml training.rounds=10 protocol.seeds=[0,1]
    """
    from fedshift.cli.run import run_file

    run_file(experiment, overrides or [], runs)


@app.command()
def check(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Say everything that can be known before training: data, classes, sizes, fit, hours and bytes to expect."""
    from fedshift.cli.check import check_file

    check_file(experiment, overrides or [])


@app.command()
def features(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Run a frozen backbone over the experiment's images once, and keep what it says for every later run.

    Example: fedshift features office.yaml device=cuda
    """
    from fedshift.cli.features import features_file

    features_file(experiment, overrides or [])


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds it.", metavar="DIR")],
    format: Annotated[str, typer.Option("--format", help="terminal, markdown, latex or json.")] = "terminal",
    select: Annotated[str, typer.Option("--select", help="last, source or oracle.")] = "last",
) -> None:
    """Print the table of an experiment's finished runs."""
    from fedshift.cli.table import print_table

    print_table(folder, format, select)


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="A method.", metavar="[NAME]")] = None) -> None:
    """List the methods, or explain one: its paper, what leaves a site, its options."""
    from fedshift.cli.methods import show_methods

    show_methods(name)


@app.command()
def datasets(name: Annotated[str | None, typer.Argument(help="A data set.", metavar="[NAME]")] = None) -> None:
    """List the data sets, or explain one: source, licence, layout, how to get it, whether it is here."""
    from fedshift.cli.datasets import show_datasets

    show_datasets(name)


@app.command()
def demo(runs: Runs = Path("runs")) -> None:
    """Compare DeepAll, FedAvg and CSAC on rotated handwritten digits: a table and a page in about two minutes."""
    from fedshift.cli.run import run_file

    run_file(Path(__file__).with_name("demo.yaml"), [], runs)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    data: Annotated[Path, typer.Argument(help="An image, a folder of images, an .npz or a .csv.", metavar="DATA")],
    format: Annotated[str, typer.Option("--format", help="terminal, csv or json.")] = "terminal",
    method: Annotated[
        str | None, typer.Option("--method", help="FILE.py:Class of a method of your own that made the model.")
    ] = None,
) -> None:
    """Predict with a trained model."""
    from fedshift.cli.predict import print_predictions

    print_predictions(model, data, format, method)


audit = typer.Typer(
    help="What could be learned from what leaves a site.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(audit, name="audit")


@audit.command()
def leakage(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    site: Annotated[str | None, typer.Option("--site", help="The source that is attacked; else the first.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Samples in a mini-batch; again for more. [1, 4, 8]")
    ] = None,
    attack: Annotated[str, typer.Option("--attack", help="l2, cosine or both.")] = "both",
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Evaluations of each attempt.")] = 300,
    starts: Annotated[int, typer.Option("--starts", min=1, help="Attempts of each attack; the best counts.")] = 4,
    model: Annotated[
        Path | None, typer.Option("--model", help="A finished run's folder: attack after training.", metavar="RUN")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the results; else runs/NAME/audit.", metavar="DIR")
    ] = None,
) -> None:
    """Try to reconstruct a site's samples from the gradient of a mini-batch, and from the model after an epoch.

    Example: fedshift audit leakage digits.yaml --site D15 --batch 1 --batch 4
    """
    from fedshift.cli.audit import audit_file

    audit_file(
        experiment,
        overrides or [],
        out,
        site=site,
        batches=batch or (1, 4, 8),
        attack=attack,
        iterations=iterations,
        starts=starts,
        model=model,
    )


def _version(value: bool) -> None:
    if value:
        from fedshift import __version__

        typer.echo(f"fedshift {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model across sites whose data cannot be pooled and do not look alike."""
