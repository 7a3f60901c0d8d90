"""The commands and their options. Each does its work in a file of its own, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.results import results

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
def models(name: Annotated[str | None, typer.Argument(help="A network.", metavar="[NAME]")] = None) -> None:
    """List the networks, or explain one and its options."""
    from fedshift.cli.fields import show_models

    show_models(name)


@app.command()
def fields(
    section: Annotated[str | None, typer.Argument(help="protocol, training or engine.", metavar="[SECTION]")] = None,
) -> None:
    """List what may stand in an experiment's protocol, training and engine."""
    from fedshift.cli.fields import show_fields

    show_fields(section)


@app.command()
def demo(runs: Runs = Path("runs")) -> None:
    """Compare DeepAll, FedAvg and CSAC on rotated handwritten digits: a table and a page.

    Two idle cores take less than two minutes; a busy machine takes longer, and says how long.
    """
    from fedshift.cli.run import run_file

    typer.echo("36 small runs: less than two minutes on two idle cores, longer on a busy machine", err=True)
    run_file(Path(__file__).with_name("demo.yaml"), [], runs)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A run's folder or a model.safetensors.", metavar="RUN_OR_MODEL")],
    data: Annotated[Path, typer.Argument(help="An image, a folder of images, an .npz or a .csv.", metavar="DATA")],
    format: Annotated[str, typer.Option("--format", help="terminal, csv or json.")] = "terminal",
    method: Annotated[
        str | None, typer.Option("--method", help="FILE.py:Class of a method of your own that made the model.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option("--masks", help="Segmentation: the folder that predicted masks are written to.")
    ] = None,
) -> None:
    """Predict with a trained model."""
    from fedshift.cli.predict import print_predictions

    print_predictions(model, data, format, method, masks)


audit = typer.Typer(
    help="What could be learned from what leaves a site.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(audit, name="audit")
app.add_typer(results, name="results")


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


project = typer.Typer(
    help="A federation over a network: who takes part, their start-up kits; or a whole one on this machine, to try.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(project, name="project")
ProjectFile = Annotated[Path, typer.Argument(help="The project's file.", metavar="PROJECT.yaml")]


@project.command("init")
def project_init(
    path: ProjectFile,
    site: Annotated[list[str], typer.Option("--site", help="A site's name; again for more.")],
    server: Annotated[str, typer.Option("--server", help="The name under which sites reach the coordinator.")],
    contact: Annotated[str, typer.Option("--contact", help="An e-mail address.")],
    name: Annotated[str, typer.Option("--name", help="The project's name.")] = "federation",
    port: Annotated[int, typer.Option("--port", help="The coordinator's one port.")] = 8002,
) -> None:
    """Write a project's file.

    Example: fedshift project init project.yaml --site north --site south --server fl.example.org --contact a@b.org
    """
    from fedshift.cli.project import init_project

    init_project(path, name, contact, server, port, site)


@project.command("provision")
def project_provision(
    path: ProjectFile,
    out: Annotated[Path, typer.Option("--out", help="Folder of the kits.", metavar="DIR")] = Path("kits"),
    renew: Annotated[bool, typer.Option("--renew", help="Make all kits anew, with a new authority.")] = False,
) -> None:
    """Make a start-up kit for the coordinator and one per site; again, for sites that were added."""
    from fedshift.cli.project import provision_project

    provision_project(path, out, renew)


@project.command("try")
def project_try(
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment with data on this machine.", metavar="[EXPERIMENT.yaml]")
    ] = None,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    port: Annotated[int | None, typer.Option("--port", help="The coordinator's port; else a free one.")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Leave kits and logs here.", metavar="DIR")] = None,
) -> None:
    """Play a whole federation on this machine: a process per role, mutual TLS over loopback."""
    from fedshift.cli.project import try_project

    try_project(experiment, overrides or [], runs, port, keep)


coordinator = typer.Typer(
    help="The coordinator's service.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(coordinator, name="coordinator")
KitFolder = Annotated[
    Path, typer.Option("--kit", help="The coordinator's kit.", metavar="DIR", envvar="FEDSHIFT_COORDINATOR")
]
Foreground = Annotated[bool, typer.Option("--foreground", help="Stay, for systemd and containers.")]


@coordinator.command("start")
def coordinator_start(kit: KitFolder = Path("coordinator"), foreground: Foreground = False) -> None:
    """Start the coordinator's service; deployments that are not finished go on."""
    from fedshift.cli.site import start_coordinator

    start_coordinator(kit, foreground)


@coordinator.command("status")
def coordinator_status(kit: KitFolder = Path("coordinator")) -> None:
    """Say whether the coordinator's service runs, and until when its kit is valid."""
    from fedshift.cli.site import show_coordinator

    show_coordinator(kit)


@coordinator.command("stop")
def coordinator_stop(kit: KitFolder = Path("coordinator")) -> None:
    """Stop the coordinator's service."""
    from fedshift.cli.site import stop_coordinator

    stop_coordinator(kit)


site = typer.Typer(
    help="A site's service: what it holds, what it allows.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(site, name="site")
SiteFile = Annotated[Path, typer.Argument(help="The site's own file.", metavar="SITE.yaml")]


@site.command("check")
def site_check(path: SiteFile = Path("SITE.yaml")) -> None:
    """Read the site's data as they would be used; say what would and what would not leave it."""
    from fedshift.cli.site import check_site

    check_site(path)


@site.command("start")
def site_start(path: SiteFile = Path("SITE.yaml"), foreground: Foreground = False) -> None:
    """Start the site's service: it dials out to the coordinator, and listens to nobody."""
    from fedshift.cli.site import start_site

    start_site(path, foreground)


@site.command("stop")
def site_stop(path: SiteFile = Path("SITE.yaml")) -> None:
    """Stop the site's service."""
    from fedshift.cli.site import stop_site

    stop_site(path)


@app.command()
def deploy(
    what: Annotated[
        str,
        typer.Argument(help="An experiment's file; or status, logs, abort, resume.", metavar="EXPERIMENT.yaml|ACTION"),
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(help="Fields to set; or the deployment's name.", metavar="[KEY.PATH=VALUE|NAME]..."),
    ] = None,
    kit: KitFolder = Path("coordinator"),
    runs: Runs = Path("runs"),
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Run an experiment over the sites of a project; on the coordinator's machine.

    Examples: fedshift deploy study.yaml; fedshift deploy status; fedshift deploy resume study
    """
    from fedshift.cli.deploy import deploy

    deploy(what, rest or [], kit, runs, detach)


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
