"""``fedshift label``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.arguments import OwnMethod, OwnNetwork, RunOrModel, TextOrJson, Written, check_format
from fedshift.errors import UserError
from fedshift.text import json_text, printable

if TYPE_CHECKING:
    from fedshift.data.table_files import SiteFormat
    from fedshift.evaluation.estimate.labelling import Interval
    from fedshift.experiment.labelling import FromLabels, ToLabel
    from fedshift.experiment.predict import TrainedModel


def label(
    run: RunOrModel,
    data: Annotated[Path, typer.Argument(help="Samples of a site: as for predict.", metavar="DATA")],
    overrides: Written = None,
    number: Annotated[int | None, typer.Option("--number", min=1, help="Samples to label. [50]")] = None,
    out: Annotated[Path, typer.Option("--out", help="The list to write.", metavar="FILE")] = Path("labels.csv"),
    labels: Annotated[
        Path | None, typer.Option("--labels", help="A list that is filled in: what follows from it.", metavar="FILE")
    ] = None,
    width: Annotated[float, typer.Option("--width", help="Points that an interval should have.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draw.")] = 0,
    at_random: Annotated[bool, typer.Option("--at-random", help="Without groups of confidence.")] = False,
    format: TextOrJson = "terminal",
    method: OwnMethod = None,
    network: OwnNetwork = None,
) -> None:
    """Say which samples to label at a site without labels; and how good the model is there, from the labels given.

    With both --labels and --number, a longer list is written that has the labels of the shorter one.
    """
    from fedshift.cli.predict import table_format
    from fedshift.experiment.labelling import list_to_label, samples_to_label
    from fedshift.experiment.predict import load_model

    check_format(format)
    written = table_format(overrides or [], "label")
    trained = load_model(run, method, network)
    known: dict[int, str] = {}
    if labels is not None:
        before, known = list_to_label(trained, data, labels, written)
        if number is None:
            _tell(before.measure(known, width), format)
            return
        drawn = before.drawn
        to_label = samples_to_label(
            trained, data, number, seed, strata=drawn.stratified, most=drawn.asked, written=written
        )
        if lost := set(known) - set(to_label.rows):
            raise UserError(
                f"--number: {len(lost)} samples that have labels are not in a list of {number} with seed {seed}: ask "
                "for more, or use the seed of before"
            )
    else:
        to_label = samples_to_label(
            trained, data, 50 if number is None else number, seed, strata=False if at_random else None, written=written
        )
    to_label.write(out, known)
    accuracy = _expected_accuracy(trained, run, data, written, to_label)
    plan = {
        "list": str(out),
        "rows": to_label.rows,
        "groups": len(to_label.drawn.sizes),
        "expected_width": to_label.interval_at(accuracy).width,
        "width": width,
        "needed": to_label.labels_for(accuracy, width),
    }
    if format == "json":
        print(json_text(plan, indent=2))
        return
    for line in _plan_lines(to_label, plan, accuracy, out):
        print(printable(line))


def _expected_accuracy(
    trained: TrainedModel, run: Path, data: Path, written: SiteFormat | None, to_label: ToLabel
) -> float:
    """The estimated accuracy; else the mean confidence."""
    from fedshift.experiment.estimate import estimate_at

    estimate = estimate_at(trained, run if run.is_dir() else run.parent, data, written).estimate
    return float(100 * to_label.scores.max(axis=1).mean()) if estimate is None else estimate


def _plan_lines(to_label: ToLabel, plan: dict[str, object], accuracy: float, out: Path) -> Iterator[str]:
    from fedshift.evaluation.estimate.labelling import LEVEL

    how = f"at random in {plan['groups']} groups of confidence" if to_label.drawn.stratified else "at random"
    numbers = f"{len(to_label.rows)} of {len(to_label.names)} samples"
    yield f"{out}: {numbers}, drawn {how}; fill in the column label, from the top"
    yield (
        f"at an accuracy of {accuracy:.0f} % their labels give an interval of about {plan['expected_width']:.0f} "
        f"points ({LEVEL:.0%}); {plan['width']:g} points take about {plan['needed']} labels"
    )


def _tell(measured: FromLabels, format: str) -> None:
    if format == "json":
        print(json_text(measured.plain(), indent=2))
        return
    print(f"{measured.labels} labels of {measured.samples} samples")
    print(f"accuracy: {_in_words(measured.accuracy)}")
    if measured.auroc is not None:
        print(f"AUROC: {_in_words(measured.auroc)}")
    more = measured.needed - measured.labels
    what = f"{more} more labels" if more > 0 else "no more labels"
    print(f"an interval of {measured.width:g} points for the accuracy takes {what} ({measured.needed} in all)")


def _in_words(interval: Interval) -> str:
    from fedshift.evaluation.estimate.labelling import LEVEL

    return f"{interval.value:.1f} % ({interval.low:.1f} to {interval.high:.1f} in {LEVEL:.0%} of cases)"
