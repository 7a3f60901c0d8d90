"""The commands and their options. Each command's work is in its own file, imported when the command is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from fedshift.cli import listings
from fedshift.cli.arguments import ExperimentFile, Overrides, Runs, Trust
from fedshift.cli.pack import pack, unpack
from fedshift.cli.trusting import may_ask
from fedshift.deploy_door import deploy_entrance
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


OwnMethod = Annotated[str | None, typer.Option("--method", help="FILE.py:Class, if your own method trained the model.")]
OwnNetwork = Annotated[
    str | None, typer.Option("--network", help="FILE.py:Class, if the model is of your own network.")
]


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
        bool,
        typer.Option("--wait", help="Wait for runs that other processes train; take over from those gone."),
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


@app.command(rich_help_panel=TRAIN)
def check(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    noise_cost: Annotated[
        bool,
        typer.Option("--noise-cost", help="Train once with training.privacy and once without; say both accuracies."),
    ] = False,
    trust: Trust = False,
) -> None:
    """Report what is known before training: data, classes, sizes, compatibility, the expected hours and bytes.

    Also says how many of its runs are finished, or that the folder of its runs belongs to another experiment.

    Example: fedshift check hearts.yaml 'data={name: heart_disease}' --noise-cost
    """
    refuse_slips(experiment, overrides or [])  # before torch is imported
    from fedshift.cli.check import check_file

    with may_ask(trust):
        check_file(experiment, overrides or [], runs, noise_cost=noise_cost)


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
    from fedshift.cli.report_page import watch, write_report

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
    from fedshift.cli.report_page import write_report

    write_report(folder)


@app.command(hidden=True)
def watch(folder: WatchedFolder, port: Port = 8765) -> None:
    """The older name of fedshift page --live."""
    from fedshift.cli.report_page import watch as watch_folder

    watch_folder(folder, port)


for listing in (listings.methods, listings.datasets, listings.models, listings.fields):
    app.command(rich_help_panel=LOOK_UP)(listing)


@app.command(rich_help_panel=READ)
def predict(
    model: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    data: Annotated[Path, typer.Argument(help="An image, a folder of images, an .npz or a table.", metavar="DATA")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="How a table is written, such as data.decimal=,", metavar="[data.FIELD=VALUE]..."),
    ] = None,
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
    from fedshift.cli.predict import print_predictions

    print_predictions(model, data, format, method, masks, network, accept_shift, overrides or [])


@app.command(rich_help_panel=READ)
def estimate(
    run: Annotated[Path, typer.Argument(help="A run's folder, beside those that left out others.", metavar="RUN")],
    data: Annotated[Path, typer.Argument(help="Samples of a new site: as for predict.", metavar="DATA")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="How a table is written, such as data.decimal=,", metavar="[data.FIELD=VALUE]..."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="terminal or json.")] = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Estimate a model's accuracy at a site without labels, with an interval; or say why that is not possible."""
    from fedshift.cli.estimate import print_estimate

    print_estimate(run, data, format, method, network, overrides or [])


@app.command(rich_help_panel=READ)
def label(
    run: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    data: Annotated[Path, typer.Argument(help="Samples of a site: as for predict.", metavar="DATA")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="How a table is written, such as data.decimal=,", metavar="[data.FIELD=VALUE]..."),
    ] = None,
    number: Annotated[int | None, typer.Option("--number", min=1, help="Samples to label. [50]")] = None,
    out: Annotated[Path, typer.Option("--out", help="The list to write.", metavar="FILE")] = Path("labels.csv"),
    labels: Annotated[
        Path | None, typer.Option("--labels", help="A list that is filled in: what follows from it.", metavar="FILE")
    ] = None,
    width: Annotated[float, typer.Option("--width", help="Points that an interval should have.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draw.")] = 0,
    at_random: Annotated[bool, typer.Option("--at-random", help="Without groups of confidence.")] = False,
    format: Annotated[str, typer.Option("--format", help="terminal or json.")] = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Say which samples to label at a site without labels; and how good the model is there, from the labels given.

    With both --labels and --number, a longer list is written that has the labels of the shorter one.
    """
    from fedshift.cli.label import label_samples

    label_samples(
        run,
        data,
        number=number,
        out=out,
        labels=labels,
        width=width,
        seed=seed,
        at_random=at_random,
        format=format,
        own_code=(method, network),
        overrides=overrides or [],
    )


@app.command(rich_help_panel=READ)
def monitor(
    run: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    data: Annotated[Path, typer.Argument(help="The samples of a new month: as for predict.", metavar="DATA")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="How a table is written, such as data.decimal=,", metavar="[data.FIELD=VALUE]..."),
    ] = None,
    log: Annotated[Path, typer.Option("--log", help="A line for each month.", metavar="FILE")] = Path("monitor.jsonl"),
    month: Annotated[str | None, typer.Option("--month", help="Its name in the log. [its number]")] = None,
    alarms: Annotated[
        float, typer.Option("--alarms", help="Share of unchanged months that may be called a drift.")
    ] = 0.01,
    baseline: Annotated[int, typer.Option("--baseline", min=1, help="First months, to compare others with.")] = 3,
    format: Annotated[str, typer.Option("--format", help="terminal or json.")] = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Compare a new month's samples with the training data and the first months; exit code 1 if somebody should look.

    Each month adds a line of sums to the log: no sample, no name of one. 0: no alarm; 2: a mistake in what was given.
    """
    from fedshift.cli.monitor import print_month

    print_month(
        run,
        data,
        log,
        month=month,
        alarms=alarms,
        baseline=baseline,
        format=format,
        own_code=(method, network),
        overrides=overrides or [],
    )


@app.command(rich_help_panel=READ)
def export(
    model: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    to: Annotated[str, typer.Option("--to", help="onnx, torchscript or safetensors.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to. [RUN/export]", metavar="DIR")] = None,
    method: OwnMethod = None,
    network: OwnNetwork = None,
    accept_shift: Annotated[
        bool, typer.Option("--accept-shift", help="Also a model that was adapted to data that look too unlike.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", help="Also to this repository on Hugging Face's hub.", metavar="OWNER/NAME")
    ] = None,
) -> None:
    """Write a trained model for other programs, with its preprocessing, and a model card (README.md) beside it.

    Nothing is written unless the outputs agree with fedshift's own.
    """
    from fedshift.cli.export import export_run

    export_run(model, to, out, method, network, accept_shift, push)


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
if (entrance := deploy_entrance()) is not None:
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
