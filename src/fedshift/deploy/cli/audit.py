"""``fedshift audit leakage`` and ``fedshift audit membership``."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedshift.cli.console import safe_console, say
from fedshift.deploy.audit.attacks import Case, Watcher
from fedshift.deploy.audit.leakage import LeakageAudit, audit_leakage, picture
from fedshift.deploy.audit.membership import AtRate, MembershipAttack, MembershipAudit, audit_membership
from fedshift.deploy.site_file import load_site
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment, load
from fedshift.files import write_bytes
from fedshift.json_objects import write_object
from fedshift.report.folding import Folded

RECORD, PICTURE, MEMBERSHIP = "leakage.json", "leakage.png", "membership.json"


def audit_file(
    path: Path,
    overrides: Sequence[str],
    out: Path | None,
    site_file: Path | None = None,
    *,
    runs: Path = Path("runs"),
    **options: Any,
) -> None:
    """Attack a site of an experiment, with a progress bar. Print the table; write the record and the picture."""
    if site_file is not None:
        options["policy"] = load_site(site_file).file.policy
    with _auditing(path, overrides, out, runs) as (experiment, folder):
        result = _audit_with_bar(safe_console(stderr=True), experiment, options)
        write_object(folder / RECORD, _record(result), indent=2)
        written = [RECORD]
        if result.images:
            write_bytes(folder / PICTURE, picture(result.cases))
            written.append(PICTURE)
    _print(result)
    for name in written:
        say(f"wrote {folder / name}", stderr=True)


@contextlib.contextmanager
def _auditing(path: Path, overrides: Sequence[str], out: Path | None, runs: Path) -> Iterator[tuple[Experiment, Path]]:
    """The experiment to audit inside the block, and the folder to write to: made now, so that it fails early."""
    try:
        experiment = load(path, overrides)
        folder = out or runs / experiment.name / "audit"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot make the folder {folder}: {error.strerror or error}") from None
        yield experiment, folder
    except KeyboardInterrupt:
        say("interrupted: nothing was written", stderr=True)
        sys.exit(130)


def _record(result: LeakageAudit | MembershipAudit) -> dict[str, Any]:
    return {"command": shlex.join(["fedshift", *sys.argv[1:]]), **result.record()}


def _audit_with_bar(errors: Console, experiment: Any, options: dict[str, Any]) -> LeakageAudit:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )
    try:
        return audit_leakage(experiment, watcher=Bar(progress), **options)
    finally:
        progress.stop()


class Bar(Watcher):
    """Shows the progress of an audit as one bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("audit", total=None)

    def begin(self, evaluations: int) -> None:
        self._progress.update(self._task, total=evaluations)
        self._progress.start()

    def case(self, title: str) -> None:
        self._progress.update(self._task, description=title)

    def advance(self, number: int) -> None:
        self._progress.advance(self._task, number)


def _print(audit: LeakageAudit) -> None:
    console = safe_console()
    say(
        f"site {audit.site} of {audit.data}: {audit.samples} training samples; {audit.model}, {audit.parameters:,} "
        f"parameters, weights: {audit.weights}"
    )
    likeness = ("PSNR", "guess", "SSIM", "guess") if audit.images else ("guess", "correlation", "guess")
    bounds = ("95 % bounds",) if audit.repeats > 1 else ()
    head = ("sent", "sites", "size", "steps", "attack", "MSE", *likeness, *bounds, "labels")
    console.print(Folded(head, [_row(case) for case in audit.cases], names=1 + head.index("attack")))
    measured = "SSIM" if audit.images else "correlation"
    say(
        "Means over the reconstructions, each beside the original that it resembles most: of the mini-batch, or of all "
        "training samples of the sites for an epoch. sites: 1 is what the site itself sends, more are in the sum that "
        "the server sees with aggregation: secure. guess: the sites' mean sample in place of a reconstruction. labels: "
        f"how many of the mini-batches' were inferred. 95 % bounds: of the mean {measured}. An attack that fails says "
        "nothing about better ones."
    )
    _print_crafted(console, audit)
    for note in audit.notes:
        say(f"note: {note}")


def _print_crafted(console: Console, audit: LeakageAudit) -> None:
    rows = []
    for case in audit.crafted:
        whose = "chosen" if case.chosen else "own"
        name = f"{whose} {case.network['name']} {case.network.get('hidden', '')}"
        left = f"{case.read} leave" if case.refused is None else f"refused, {case.refused}"
        rows.append([name, case.layout, f"{case.read}/{case.samples}", f"{case.exposure:.2f}", left])
    head = ("crafted network", "layout", "read", "exposure", "under the policy")
    console.print(Folded(head, rows, words=range(1, len(head))))


def _row(case: Case) -> list[str]:
    sent = "gradient" if case.exchange == "batch" else "epoch"
    cells = [sent, str(case.sites), str(case.batch), str(case.steps or "–"), case.attack]
    cells.append(f"{fmean(case.mse):.4f}")
    if case.psnr is not None and case.ssim is not None:
        cells += [
            f"{fmean(case.psnr):.1f}",
            f"{case.guess_psnr:.1f}",
            f"{fmean(case.ssim):.2f}",
            f"{case.guess_ssim:.2f}",
        ]
    elif case.correlation is not None:
        cells += [f"{case.guess_mse:.4f}", f"{fmean(case.correlation):.2f}", f"{case.guess_correlation:.2f}"]
    if case.bounds is not None:
        cells.append(f"{case.bounds[0]:.2f} to {case.bounds[1]:.2f}")
    return [*cells, "–" if case.labels_right is None else f"{case.labels_right}/{len(case.labels)}"]


# Membership -----------------------------------------------------------------------------------------------------------


def membership_file(
    path: Path, overrides: Sequence[str], out: Path | None, *, runs: Path, site: str | None, trainings: int
) -> None:
    """Attack the models of an experiment; print the table and write the record. Arguments as of `audit_file`."""

    def say_done(number: int) -> None:
        say(f"training {number + 1} of {trainings} is done", stderr=True)

    with _auditing(path, overrides, out, runs) as (experiment, folder):
        result = audit_membership(experiment, site=site, trainings=trainings, trained=say_done)
        text = json.dumps(_record(result), indent=2, ensure_ascii=False)
        write_bytes(folder / MEMBERSHIP, f"{text}\n".encode())
    _print_membership(result)
    say(f"wrote {folder / MEMBERSHIP}", stderr=True)


def _print_membership(audit: MembershipAudit) -> None:
    console = safe_console()
    claimed = "no privacy" if audit.claimed is None else f"ε ≤ {audit.claimed[0]:.2f} at δ = {audit.claimed[1]:g}"
    say(
        f"site {audit.site} of {audit.data}, {audit.method}, {claimed}: {audit.trainings} trainings on half of "
        f"{audit.units} {audit.unit}s; accuracy {audit.accuracy_of_members:.1f} on those that trained, "
        f"{audit.accuracy_of_others:.1f} on the others"
    )
    rows, at_rates = list[list[str]](), list[list[str]]()
    for attack in audit.attacks:
        share = 100 * attack.right / attack.guesses
        rows.append(
            [
                attack.name,
                str(attack.guesses),
                f"{share:.1f} %",
                _bounds(attack),
                f"{attack.auc:.1f}",
                f"{attack.epsilon:.2f}",
            ]
        )
        for at in attack.at_rates:
            accused, caught = 100 * at.false / at.others, 100 * at.caught / at.members
            at_rates.append([attack.name, f"{accused:.2f} %", f"{caught:.2f} %", _bounds(at, 2)])
    console.print(Folded(["attack", "guesses", "right", "95 % bounds", "AUC", "ε at least"], rows))
    say(
        "Of each training the fifth of the samples that looks most like members is guessed to be, and the fifth that "
        "looks least like them not to be; 50 % right is chance."
    )
    console.print(Folded(["attack", "false accusations", "members found", "95 % bounds"], at_rates))
    say(
        "Members found while 1 % and 0.1 % of the others are accused, as far as the other trainings tell where to draw "
        "the line; as many as are accused is chance. An attack that fails says nothing about better ones."
    )


def _bounds(measure: MembershipAttack | AtRate, digits: int = 1) -> str:
    return f"{100 * measure.low:.{digits}f} to {100 * measure.high:.{digits}f}"
