"""A site's card, which describes the site before training. The site makes it and the coordinator checks it.

The coordinator trusts no number in a card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    Field,
    PositiveFloat,
    RootModel,
    StringConstraints,
    field_validator,
    model_validator,
)

from fedshift.data.domain import Preprocessing, SparseRows
from fedshift.data.tables import TableEncoding
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.json_files import CARDS, SEND_AGAIN, read_stored
from fedshift.deploy.remote.policy import CONFIDENCES, MOMENTS, Policy
from fedshift.deploy.site_file import Holding
from fedshift.digests import Damaged
from fedshift.errors import UserError
from fedshift.evaluation.estimate.input_sums import MOST_VALUES
from fedshift.experiment.changed_samples import LARGEST
from fedshift.experiment.environment import versions
from fedshift.extras import import_extra
from fedshift.federation.plain_values import Closed, Frozen
from fedshift.files import hold_lock
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon
from fedshift.json_objects import write_object

MOST_SAMPLES = 50_000_000
"""Most samples of one site. The coordinator lists a site's rows by number, in 8 bytes each."""
MOST_CLASSES, MOST_COLUMNS, MOST_CATEGORIES = 100_000, 1_000_000, 100_000
LARGEST_SAMPLE = 2**31
"""Most numbers in one sample."""

Name = Annotated[str, StringConstraints(max_length=500)]
"""Name of a class, a column or a category."""
Word = Annotated[str, StringConstraints(max_length=100)]
Count = Annotated[int, Field(ge=0, le=MOST_SAMPLES)]
Share = Annotated[float, Field(gt=0, le=1)]
Size = Annotated[int, Field(ge=1, le=LARGEST_SAMPLE)]
# The squares of sums must not overflow.
Sums = Annotated[tuple[Annotated[float, Field(ge=-1e150, le=1e150)], ...], Field(max_length=MOST_COLUMNS)]
Columns = Annotated[tuple[Name, ...], Field(max_length=MOST_COLUMNS)]


class GivenLabel(Closed):
    """Sums of a label that is a quantity, for its scale."""

    count: Count
    total: Annotated[float, Field(ge=-1e150, le=1e150)]
    squares: Annotated[float, Field(ge=0, le=1e300)]


class GivenMoments(Closed):
    """Sums and sums of squares per column or channel, for standardising."""

    kind: Literal["moments"]
    count: Annotated[int, Field(ge=1, le=2**62)]
    total: Sums
    squares: Sums
    label: GivenLabel | None = None


class GivenTable(Closed):
    """Statistics of a table: sums per numeric column, values per categorical column."""

    kind: Literal["table"]
    numeric: Columns
    categorical: Columns
    count: Annotated[tuple[Count, ...], Field(max_length=MOST_COLUMNS)]
    total: Sums
    squares: Sums
    any_missing: Annotated[tuple[bool, ...], Field(max_length=MOST_COLUMNS)]
    categories: Annotated[tuple[tuple[Name, ...], ...], Field(max_length=MOST_COLUMNS)]
    label: GivenLabel | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("count", "total", "squares", "any_missing"):
            if len(getattr(self, name)) != len(self.numeric):
                raise ValueError(f"{name} has not one entry per numeric column")
        if len(self.categories) != len(self.categorical):
            raise ValueError("categories has not one entry per categorical column")
        if sum(map(len, self.categories)) > MOST_CATEGORIES:  # each is a column of the encoded table
            raise ValueError(f"there are more than {MOST_CATEGORIES} categories")
        return self


LATEST = 1e12
"""Seconds since 1970 that a clock can show; an integer of any size would overflow as a float."""
Spent = Annotated[tuple[tuple[PositiveFloat, Share, Count], ...], Field(max_length=10_000)]
"""What a site has spent: (noise multiplier, sample rate, steps) by kind of step."""


class GivenPrivacy(Closed):
    """A site's budget of privacy, and what it has spent."""

    epsilon: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1)]
    measurement_noise: PositiveFloat | None
    confidences_noise: PositiveFloat | None = None
    spent: Spent


class Card(Closed):
    """One site: its versions, the form of its samples, its classes, how many samples it has."""

    versions: Annotated[dict[Word, Word], Field(max_length=50)]
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4)]
    type: Literal["uint8", "float32", "int64", "sparse"]
    preprocessing: Preprocessing
    classes: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_CLASSES)]
    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    rows: dict[Word, tuple[Count, Count]]  # the numbers of training and held-out samples, by seed
    given: Annotated[GivenMoments | GivenTable, Field(discriminator="kind")] | None
    grouped: bool
    fixed_split: bool = False  # whether its data fix the test samples; then statistics are of the others
    # whether it has no labels, or few; then rows without one train, as those of a target, and the others measure
    unlabelled: bool = False
    only_source: bool = False  # whether it holds the few labels of another site, which train: it is no target
    fingerprint: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    send: Annotated[tuple[Word, ...], Field(max_length=50)]
    secure: Literal["allowed", "required"] = "allowed"
    smallest_sum: Annotated[int, Field(ge=3, le=2**20)] = 3
    one_roster: bool = False
    colluders: Annotated[int, Field(ge=0, le=1000)] = 0
    device: Word
    threads: Annotated[int, Field(ge=1, le=2**20)]
    privacy: GivenPrivacy | None = None  # its budget, if it has one

    @field_validator("shape")
    @classmethod
    def _small_enough(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > LARGEST_SAMPLE:
            raise ValueError(f"a sample has more than {LARGEST_SAMPLE} numbers")
        return shape

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        for seed, (train, held_out) in self.rows.items():
            if train + held_out > self.samples:
                raise ValueError(f"rows of seed {seed} are {train} and {held_out}, of {self.samples} samples")
        if self.preprocessing.shape not in (None, self.shape):
            raise ValueError(f"samples have the shape {self.shape}, preprocessing {self.preprocessing.shape}")
        if self.given is not None and isinstance(self.given, GivenTable) != (self.preprocessing.kind == "table"):
            raise ValueError(f"given is of the kind {self.given.kind}, preprocessing {self.preprocessing.kind}")
        if (self.type == "int64") != (self.preprocessing.kind == "tokens"):
            raise ValueError(f"samples are {self.type}, preprocessing is for {self.preprocessing.kind}")
        objective = self.preprocessing.objective
        label = None if self.given is None else self.given.label
        if (label is None) != (objective is None or objective.get("task") != "regression"):
            raise ValueError("given has sums of the label, and preprocessing a regression, or neither")
        described = {train for train, _ in self.rows.values()} if self.fixed_split else {self.samples}
        if label is not None and label.count not in described:
            raise ValueError(f"given counts {label.count} labels of {self.samples} samples")
        if objective is not None:
            try:
                objective_of(self.preprocessing)
            except UserError as error:
                raise ValueError(str(error)) from None
        self._check_counts()
        return self

    @property
    def gives_confidences(self) -> bool:
        """Whether sums of confidences may leave the site: with a budget they must have noise."""
        noise = None if self.privacy is None else self.privacy.confidences_noise
        return CONFIDENCES in self.send and (self.privacy is None or noise is not None)

    @property
    def gives_moments(self) -> bool:
        """Whether sums of inputs may leave the site, and can be made of them. No noise covers them."""
        return MOMENTS in self.send and self.privacy is None and self.changeable

    @property
    def changeable(self) -> bool:
        """Whether samples are vectors of numbers or images of bytes, and small enough to be changed."""
        sizes = {"uint8": 3, "float32": 1, "sparse": 1}.get(self.type)
        small = sizes == 1 or max(self.shape[1:], default=0) <= LARGEST
        return len(self.shape) == sizes and small and math.prod(self.shape) <= MOST_VALUES

    def _check_counts(self) -> None:
        """Raise ValueError unless what is given can be of this many samples of this shape."""
        if isinstance(self.given, GivenTable) and any(count > self.samples for count in self.given.count):
            raise ValueError(f"given counts more values than there are samples ({self.samples})")
        if isinstance(self.given, GivenMoments):
            if self.given.count > self.samples * math.prod(self.shape):
                raise ValueError(f"given counts more values than there are in {self.samples} samples")
            columns = len(self.given.total), len(self.given.squares)
            if columns != (self.shape[0],) * 2 and (columns != (0, 0) or self.given.label is None):
                raise ValueError(f"given has not one sum for each of {self.shape[0]} columns or channels")


class HelloAnswer(Frozen):
    """What a site answers before a run: its card, and what time it is there, in seconds since 1970."""

    card: Card
    time: Annotated[float, Field(ge=0, le=LATEST)]


def card_of(holding: Holding, rows: Mapping[str, Sequence[int]], policy: Policy, device: str) -> dict[str, Any]:
    """Make a site's card, as plain values: the coordinator checks them."""
    data, domain = holding.data, holding.domain
    if (data.preprocessing.objective or {}).get("task") in ("regression", "multi_label"):
        import_extra("sklearn", extra="report", what="a site that measures quantities or several labels")
    if domain.unlabelled:
        import_extra("pyarrow", extra="report", what="a site that keeps predictions")
    return {
        "versions": versions(),
        "shape": list(domain.inputs.shape[1:]),
        "type": "sparse" if isinstance(domain.inputs, SparseRows) else str(domain.inputs.dtype),
        "preprocessing": _without_layout(data.preprocessing).model_dump(mode="json"),
        "classes": list(data.classes),
        "samples": len(domain),
        "rows": dict(rows),
        "given": holding.given,
        "grouped": domain.groups is not None,
        "fixed_split": domain.fixed_split,
        "unlabelled": domain.unlabelled,
        "only_source": domain.only_source,
        "fingerprint": holding.fingerprint,
        "send": list(policy.send),
        "secure": policy.secure,
        "smallest_sum": policy.smallest_sum,
        "one_roster": policy.roster != "any",
        "colluders": policy.colluders,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _without_layout(preprocessing: Preprocessing) -> Preprocessing:
    """A preprocessing that tells nothing of how the site's file is written: names of its columns, units, codes."""
    if preprocessing.table is None:
        return preprocessing
    encoding = TableEncoding.model_validate(preprocessing.table)
    plain = encoding.with_choices({}, {}, None, encoding.id)
    return preprocessing.model_copy(update={"table": plain.preprocessing().table})


def check_rows(site: str, card: Card, seeds: Sequence[int]) -> None:
    """Raise UserError if a card lacks the rows of a seed of the experiment."""
    absent = next((seed for seed in seeds if str(seed) not in card.rows), None)
    if absent is not None:
        raise UserError(f"site '{site}': its card lacks the rows of seed {absent}")


# Stored cards ---------------------------------------------------------------------------------------------------------


class _Cards(RootModel[dict[str, Card]]):
    """The content of the file."""


def write_cards(folder: Path, cards: Mapping[str, Card]) -> None:
    """Write down the cards that a run begins with."""
    write_object(folder / CARDS, {site: card.model_dump(mode="json") for site, card in cards.items()})


def cards_of(folder: Path) -> dict[str, Card]:
    """The cards of a deployment's sites; empty if none were written."""
    cards = read_stored(_Cards, folder / CARDS, SEND_AGAIN, older=True)
    return {} if cards is None else cards.root


SPENT = "spent.json"
"""Beside the deployments of a coordinator."""
_REMEDY = "restore it, or move it away: what sites told before of what they spent is then not known"


class _SpentBefore(Closed):
    """The content of the file: by site, the most steps of each kind that it ever told."""

    sites: dict[str, Spent] = Field(default_factory=dict)


def noted_spending(file: Path, budgets: Mapping[str, GivenPrivacy | None]) -> tuple[list[str], list[str]]:
    """Note what sites have spent, and compare it with what they told before.

    Returns warnings: the file is damaged, or a site had a budget and has none now. And a fault for each site that told
    of more before: an older ledger was put in place of its newest one, and what it spent would be spent again.
    """
    with hold_lock(file.with_suffix(".lock")):
        try:
            before = read_stored(_SpentBefore, file, _REMEDY) or _SpentBefore()
        except Damaged as error:
            return [str(error)], []
        warnings, faults, after = list[str](), list[str](), dict(before.sites)
        for site, budget in budgets.items():
            known = _steps(before.sites.get(site, ()))
            if budget is None:
                if known:
                    warnings.append(
                        f"site '{site}' told of a budget of privacy before and has none now: ask its people whether "
                        "they know"
                    )
                continue
            noisy_steps = _steps(budget.spent)
            lacks = any(noisy_steps.get(kind, 0) < steps for kind, steps in known.items())
            if lacks and (fault := _fault(site, budget, known, noisy_steps)) is not None:
                faults.append(fault)
            elif noisy_steps:  # what is lost may be counted as something else, which costs no less
                after[site] = tuple((*kind, steps) for kind, steps in noisy_steps.items())
        if after != before.sites:
            write_object(file, _SpentBefore(sites=after).model_dump(mode="json"), private=True)
        return warnings, faults


def _steps(spent: Spent) -> dict[tuple[float, float], int]:
    return {(float(noise), float(rate)): int(steps) for noise, rate, steps in spent}


def _fault(site: str, budget: GivenPrivacy, known: Mapping[Any, int], told: Mapping[Any, int]) -> str | None:
    epsilon, delta = budget.epsilon, budget.delta
    before, now = (
        adaptive_epsilon([NoisySteps(noise, rate, steps) for (noise, rate), steps in spent.items()], epsilon, delta)
        for spent in (known, told)
    )
    if now >= before * (1 - 1e-9):
        return None
    return (
        f"site '{site}' told before that it had spent ε = {before:.3g} of its budget of privacy, and now says "
        f"{now:.3g}: its records were lost or put back from a backup; ask its people to put the newest ones back, or "
        "to use fedshift site restore, which counts what is lost"
    )
