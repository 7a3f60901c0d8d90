"""The commands and their options. What a command needs is imported when it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from fedshift.cli import listings
from fedshift.cli.arguments import ExperimentFile, Overrides, Runs, Trust, may_ask
from fedshift.cli.check import check
from fedshift.cli.estimate import estimate
from fedshift.cli.export import export
from fedshift.cli.label import label
from fedshift.cli.monitor import monitor
from fedshift.cli.pack import pack, unpack
from fedshift.cli.predict import predict
from fedshift.deploy_door import deploy_room
from fedshift.errors import UserError
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.experiment.config.experiment_file import refuse_slips

TRAIN, READ, LOOK_UP = "Train on this machine", "Read finished and running experiments", "Look up names and options"
"""Headings of the commands in ``fedshift --help``; they stand in the order of their first commands."""
app = typer.Typer(
    name="fedshift",
    help="Train one model across sites whose data cannot be pooled and do not look alike. Begin with fedshift demo.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(rich_help_panel=TRAIN)
def demo(
    runs: Runs = Path("runs"),
    explained: Annotated[
        bool,
        typer.Option("--explained", help="Also run pooled training and FedAvg on the recipe's images: 24 more runs."),
    ] = False,
) -> None:
    """Compare four methods on rotated handwritten digits; print a table and write a report.

    Takes less than two minutes on two idle cores. On a busy machine it takes longer; progress shows the time left.
    """
    from fedshift.cli.run import run_file

    many, time = ("72", "about three") if explained else ("48", "less than two")
    typer.echo(f"{many} small runs: {time} minutes on two idle cores, longer on a busy machine", err=True)
    run_file(Path(__file__).with_name("demo_explained.yaml" if explained else "demo.yaml"), [], runs, samples=True)


@app.command(rich_help_panel=TRAIN)
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    track: Annotated[
        list[str] | None,
        typer.Option("--track", help="Also write every round to tensorboard, mlflow or wandb; may be repeated."),
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Show samples on the page: the worst mistakes and features of each model.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Take the I-th of N parts of the runs alone.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for runs that other processes train; take over from those gone.")
    ] = False,
    slurm: Annotated[
        str | None,
        typer.Option("--slurm", metavar="PARTITION", help="Train in jobs of SLURM there, which share the runs."),
    ] = None,
    slurm_jobs: Annotated[int, typer.Option("--slurm-jobs", min=1, help="How many jobs.")] = 4,
    slurm_time: Annotated[
        int, typer.Option("--slurm-time", metavar="MINUTES", min=1, help="Of a job until it goes back into the queue.")
    ] = 60,
    slurm_set: Annotated[
        list[str] | None,
        typer.Option("--slurm-set", metavar="KEY=VALUE", help="Another option of sbatch, such as gres=gpu:1."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Run an experiment, or resume it where it stopped. Several processes on one folder share its runs.

    SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP end it after the round in progress with exit code 75: start it again to go on.
    Exit code 5: other processes are still training runs.

    Example: fedshift run digits.yaml training.rounds=10 protocol.seeds=[0,1]
    """
    refuse_slips(experiment, overrides or [])  # before torch is imported
    from fedshift.cli.run import run_file

    with may_ask(trust):
        if slurm is None:
            run_file(experiment, overrides or [], runs, track or [], samples, shard, wait)
            return
        from fedshift.cli.cluster import Jobs, options_of_run, submit

        options = options_of_run(track or [], samples=samples, shard=shard, wait=wait, trust=trust)
        jobs = Jobs(slurm, slurm_jobs, slurm_time, slurm_set or [])
        typer.echo(submit(experiment, overrides or [], runs, options, jobs), err=True)


@app.command(rich_help_panel=TRAIN)
def search(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    keep_out: Annotated[
        list[str] | None,
        typer.Option("--keep-out", help="A site that the search never reads; else protocol.targets, if listed."),
    ] = None,
    factor: Annotated[int, typer.Option("--factor", min=2, help="One of so many methods goes on from a rung.")] = 3,
    plan: Annotated[bool, typer.Option("--plan", help="Only show the budget.")] = False,
    trust: Trust = False,
) -> None:
    """Choose among an experiment's methods by leaving sources out, or continue such a search.

    All methods train with a part of the budget, the best with more. The first method of the list is what the others are
    compared with. Ends in an experiment file with the best, and a page.

    With a search section in the file: settings are drawn from its spaces (fedshift fields search), and one table has
    what training-domain validation, left-out domains and the oracle choose.

    Example: fedshift search means.yaml --keep-out M0 --keep-out M75
    """
    refuse_slips(experiment, overrides or [])  # before torch is imported
    from fedshift.cli.search import search_file

    with may_ask(trust):
        search_file(experiment, overrides or [], runs, keep_out or [], factor, plan)


app.command(rich_help_panel=TRAIN)(check)


@app.command(rich_help_panel=TRAIN)
def features(experiment: ExperimentFile, overrides: Overrides = None, trust: Trust = False) -> None:
    """Compute a frozen backbone's features of the experiment's images once, and cache them for all later runs.

    Example: fedshift features office.yaml device=cuda
    """
    refuse_slips(experiment, overrides or [])  # before torch is imported
    from fedshift.cli.features import features_file

    with may_ask(trust):
        features_file(experiment, overrides or [])


Folder = Annotated[Path, typer.Argument(help="An experiment's folder, or one that holds it.", metavar="DIR")]
WatchedFolder = Annotated[Path, typer.Argument(help="The folder of the runs, or a coordinator's kit.", metavar="DIR")]
Format = Annotated[str, typer.Option("--format", help="terminal, markdown, latex, csv, json or svg.")]
Select = Annotated[str, typer.Option("--select", help="last, source or oracle.")]
Metric = Annotated[
    str, typer.Option("--metric", help=f"As the task has them: {', '.join(ENTRIES)}. [the experiment's headline]")
]
Only = Annotated[int, typer.Option("--only", help="One of the tables, from 1.", show_default="all")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="With --live; 0: any that is free.")]


@app.command(rich_help_panel=READ)
def show(
    folder: Folder,
    format: Format = "terminal",
    select: Select = "last",
    metric: Metric = "",
    only: Only = 0,
    says: Annotated[bool, typer.Option("--verdict", help="The verdict alone: terminal or json.")] = False,
) -> None:
    """Show the table of finished runs, and the verdict: which method to take, what to expect, what is not known.

    Example: fedshift show runs/study --metric auroc --format markdown
    """
    from fedshift.cli.show import print_verdict
    from fedshift.cli.show import show as print_both

    if not says:
        print_both(folder, format, select, metric, only)
    elif (select, metric, only) != ("last", "", 0):
        raise UserError("--verdict: the verdict is of the last round and all metrics: leave out the other options")
    else:
        print_verdict(folder, format)


@app.command(rich_help_panel=READ)
def page(
    folder: WatchedFolder,
    live: Annotated[bool, typer.Option("--live", help="Serve a page of running ones that renews itself.")] = False,
    port: Port = 8765,
) -> None:
    """Write the page report.html of finished runs anew; or, with --live, show running ones in a browser.

    A page written anew has no samples: for these run again with --samples, which repeats no finished run.
    """
    from fedshift.cli.show import watch, write_report

    if live:
        watch(folder, port)
    else:
        write_report(folder)


@app.command(hidden=True)
def table(
    folder: Folder, format: Format = "terminal", select: Select = "last", metric: Metric = "", only: Only = 0
) -> None:
    """The older name of fedshift show, without the verdict."""
    from fedshift.cli.show import show as print_table

    print_table(folder, format, select, metric, only, says=False)


@app.command(hidden=True)
def advise(folder: Folder, format: Format = "terminal") -> None:
    """The older name of fedshift show --verdict."""
    from fedshift.cli.show import print_verdict

    print_verdict(folder, format)


@app.command(hidden=True)
def report(folder: Folder) -> None:
    """The older name of fedshift page."""
    from fedshift.cli.show import write_report

    write_report(folder)


@app.command(hidden=True)
def watch(folder: WatchedFolder, port: Port = 8765) -> None:
    """The older name of fedshift page --live."""
    from fedshift.cli.show import watch as watch_folder

    watch_folder(folder, port)


for listing in (listings.methods, listings.datasets, listings.models, listings.fields):
    app.command(rich_help_panel=LOOK_UP)(listing)
for reading in (predict, estimate, label, monitor, export):
    app.command(rich_help_panel=READ)(reading)


@app.command(rich_help_panel=READ)
def serve(
    exported: Annotated[Path, typer.Argument(help="A folder of fedshift export --to onnx.", metavar="EXPORTED")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="The address; 0.0.0.0 in a container.")] = "127.0.0.1",
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A host name that requests may name, beside localhost.")
    ] = None,
) -> None:
    """Serve an exported model over HTTP, without torch: /predict, with the guard of the input, /estimate, /healthz.

    Whoever reaches the port may ask: put a proxy that knows users in front of it. No sample is logged.
    """
    from fedshift.cli.serve import serve as serve_model

    serve_model(exported, host, port, name or [])


results = typer.Typer(help="The older name of fedshift pack and fedshift unpack.", no_args_is_help=True)
for change in (pack, unpack):
    app.command(rich_help_panel=READ)(change)
    results.command()(change)
app.add_typer(results, name="results", hidden=True)
if (entrance := deploy_room("entrance")) is not None:
    entrance.add_commands(app)


def _version(value: bool) -> None:
    if value:
        from fedshift.version import installed_version

        typer.echo(f"fedshift {installed_version()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model across sites whose data cannot be pooled and do not look alike. Begin with fedshift demo."""


@functools.cache
def command() -> Callable[..., Any]:
    """All commands as one function. Typer reads their options from the signatures, once in a process."""
    return typer.main.get_command(app)
