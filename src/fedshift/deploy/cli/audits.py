"""``fedshift audit``: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.arguments import ExperimentFile, Overrides, Runs, Trust, may_ask

Source = Annotated[str | None, typer.Option("--site", help="The source to attack. [the first]")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the results. [RUNS/NAME/audit]", metavar="DIR")]
audit = typer.Typer(help="Measure what an attacker could learn from what leaves a site.", no_args_is_help=True)


@audit.command()
def leakage(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    site: Source = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Samples in a mini-batch; repeat for several sizes. [1, 4, 8]"),
    ] = None,
    attack: Annotated[str, typer.Option("--attack", help="l2, cosine or both.")] = "both",
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Gradient evaluations of each attempt.")] = 300,
    starts: Annotated[int, typer.Option("--starts", min=1, help="Attempts of each attack; the best counts.")] = 4,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Mini-batches and epochs that are attacked; 2 and more give bounds.")
    ] = 1,
    model: Annotated[
        Path | None, typer.Option("--model", help="A finished run's folder: attack its trained model.", metavar="RUN")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="A site's file, whose policy crafted networks meet.", metavar="SITE.yaml"),
    ] = None,
    out: Out = None,
    runs: Runs = Path("runs"),
    trust: Trust = False,
) -> None:
    """Try to reconstruct a site's samples: from a mini-batch's gradient, from an epoch's model, by crafted networks.

    Example: fedshift audit leakage digits.yaml --site D15 --batch 1 --batch 4
    """
    from fedshift.deploy.cli.audit import audit_file

    with may_ask(trust):
        audit_file(
            experiment,
            overrides or [],
            out,
            policy,
            runs=runs,
            site=site,
            batches=batch or (1, 4, 8),
            attack=attack,
            iterations=iterations,
            starts=starts,
            repeats=repeats,
            model=model,
        )


@audit.command()
def membership(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    site: Source = None,
    trainings: Annotated[
        int,
        typer.Option(
            "--trainings",
            min=2,
            help="How often the method is trained. From 8 on also likelihood ratios, of half of them.",
        ),
    ] = 8,
    out: Out = None,
    runs: Runs = Path("runs"),
    trust: Trust = False,
) -> None:
    """Try to tell from a trained model which samples of a site it was trained on, and bound ε from below by it.

    The experiment's first method is trained with other samples each time. With training.privacy, the bound is compared
    with the ε that the training claims.

    Example: fedshift audit membership hearts.yaml --site cleveland --trainings 16
    """
    from fedshift.deploy.cli.audit import membership_file

    with may_ask(trust):
        membership_file(experiment, overrides or [], out, runs=runs, site=site, trainings=trainings)
