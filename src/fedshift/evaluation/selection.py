"""Selection rules: which round's model is the result. A rule is an object with a name that a table can print.

The headline is always the last round, because it needs no labels. The oracle looks at the target's labels, which nobody
has at a new site. It is reported as an upper bound and never as a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import RoundRecord, SelectedRound, Selection


class SelectionRule(Protocol):
    """A rule that chooses one of the rounds of a run."""

    name: ClassVar[Selection]
    description: ClassVar[str]

    def select(self, rounds: Sequence[RoundRecord], less_is_better: bool = False) -> int | None:
        """The index in ``rounds`` of the chosen round; None if no round can be chosen."""


def _first_best(scores: Sequence[float | None], less_is_better: bool) -> int | None:
    """The index of the best score, the first of equal ones; None if there is no score."""
    sign = -1.0 if less_is_better else 1.0
    known = [(sign * score, -index) for index, score in enumerate(scores) if score is not None]
    return -max(known)[1] if known else None


@dataclass(frozen=True)
class LastRound:
    """The last round."""

    name: ClassVar[Selection] = "last"
    description: ClassVar[str] = "last round"

    def select(self, rounds: Sequence[RoundRecord], less_is_better: bool = False) -> int | None:
        return len(rounds) - 1 if rounds else None


@dataclass(frozen=True)
class SourceValidation:
    """The round with the best mean on the sources' held-out parts, the first of equal ones.

    There is none if no source has a held-out part. Rounds in which the target was not measured cannot be chosen.
    """

    name: ClassVar[Selection] = "source"
    description: ClassVar[str] = "round with the best mean accuracy on the sources' held-out parts"

    def select(self, rounds: Sequence[RoundRecord], less_is_better: bool = False) -> int | None:
        known = [record.source_mean if record.target_accuracy else None for record in rounds]
        return _first_best(known, less_is_better)


@dataclass(frozen=True)
class Oracle:
    """The round with the best mean at the target, the first of equal ones. It looks at target labels."""

    name: ClassVar[Selection] = "oracle"
    description: ClassVar[str] = "oracle: best round by the target's own labels, an upper bound and not a result"

    def select(self, rounds: Sequence[RoundRecord], less_is_better: bool = False) -> int | None:
        return _first_best([record.target_mean for record in rounds], less_is_better)


RULES: dict[Selection, SelectionRule] = {rule.name: rule for rule in (LastRound(), SourceValidation(), Oracle())}


def selection_rule(name: str) -> SelectionRule:
    """The rule called ``name``.

    Raises:
        UserError: there is no such rule.

    Example:
        >>> selection_rule("last").description
        'last round'
    """
    for known, rule in RULES.items():
        if name == known:
            return rule
    raise UserError(f"unknown selection rule '{name}': {nearest(name, RULES)}")


def selected_rounds(
    rounds: Sequence[RoundRecord], less_is_better: bool = False, *, measured: bool = True
) -> dict[Selection, SelectedRound | None]:
    """The round that each rule chooses: the field `selected` of a `RunResult`.

    Args:
        rounds: the records of a run, in order.
        measured: whether the target has labels; if not, no round is chosen.

    Raises:
        ValueError: there is no round, or the last round was not measured.

    Example:
        >>> rounds = [
        ...     RoundRecord(round=number, target_accuracy={"a": accuracy}, seconds=1.0, mini_batches=number)
        ...     for number, accuracy in ((1, 70.0), (2, 80.0), (3, 75.0))
        ... ]
        >>> chosen = selected_rounds(rounds)
        >>> chosen["last"].accuracy, chosen["oracle"].accuracy, chosen["source"]
        (75.0, 80.0, None)
    """
    if not measured:
        return dict.fromkeys(RULES)
    if not rounds or not rounds[-1].target_accuracy:
        raise ValueError("a run needs a last round in which the target was measured")
    return {name: _selected_round(rounds, rule.select(rounds, less_is_better)) for name, rule in RULES.items()}


def _selected_round(rounds: Sequence[RoundRecord], index: int | None) -> SelectedRound | None:
    if index is None:
        return None
    record = rounds[index]
    assert record.target_mean is not None  # rules choose measured rounds only
    return SelectedRound(
        round=record.round,
        accuracy=record.target_mean,
        source_accuracy=record.source_mean,
        sites={**record.source_accuracy, **record.target_accuracy},
        common=record.common_accuracy,
        per_class=record.per_class,
        hausdorff=record.hausdorff_mean,
        hd95=record.hd95_mean,
    )
