"""Labelled and unlabelled sites train together, and both are measured: whether everybody wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from fedshift.data.domain import DataSet
from fedshift.data.splits import part_rows, split_kind
from fedshift.errors import UserError, nearest
from fedshift.experiment.protocols.base import ProtocolSection, Roles, Sides, Split, check_groups, check_names

if TYPE_CHECKING:  # it needs torch
    from fedshift.methods.base import Method

Names = Annotated[tuple[str, ...], Field(min_length=1)]


class SourceTarget(ProtocolSection):
    """Labelled and unlabelled sites train together, and both are measured. This shows whether both sides gain.

    Labelled sites are measured on their held-out samples. Unlabelled sites are measured on all their samples, on which
    they train without labels.
    """

    question: ClassVar[str] = "Does everybody win? Labelled and unlabelled sites train together and are both tested."
    next_target: ClassVar[str] = "pair of sites"
    both_sides: ClassVar[bool] = True
    extent: ClassVar[tuple[str, ...]] = ("pairs", "splits")

    kind: Literal["source_target"] = Field("source_target", description="the protocol")
    pairs: Literal["all"] | Annotated[tuple[tuple[Names, Names], ...], Field(min_length=1)] = Field(
        "all", description="pairs [labelled, unlabelled], each side a site or a list; all: every ordered pair of sites"
    )
    splits: PositiveInt = Field(
        10, description="number of random splits of the labelled sites' samples; their seeds are 0, 1, …"
    )
    labelled_test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of a labelled site's samples that is held out to measure it (0.7: the 3:7 split)"
    )

    @field_validator("pairs", mode="before")
    @classmethod
    def _two_sides(cls, pairs: object) -> object:
        if isinstance(pairs, str) or not isinstance(pairs, Sequence):
            return pairs
        return tuple(_pair(pair) for pair in pairs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each split."""
        return tuple(range(self.splits))

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The names of the pairs that the file names; empty where they are all ordered pairs."""
        return () if self.pairs == "all" else tuple(_pair_name(*pair) for pair in self.pairs)

    def targets_of(self, data: DataSet) -> tuple[str, ...]:
        """The names of the pairs."""
        check_names(self.kind, data)
        return tuple(self._named_pairs(data))

    def possible_targets(self, data: DataSet) -> tuple[str, ...]:
        """The pairs: a domain's part is not told by its name alone."""
        return self.targets_of(data)

    def _named_pairs(self, data: DataSet) -> dict[str, Roles]:
        """Name of a pair, such as "north-south" or "north+west-south": its labelled and its unlabelled sites."""
        chosen = self.pairs
        if chosen == "all":
            chosen = tuple(
                ((first,), (second,)) for first in data.domains for second in data.domains if first != second
            )
        named: dict[str, Roles] = {}
        for labelled, unlabelled in chosen:
            for name in (*labelled, *unlabelled):
                if name not in data.domains:
                    raise UserError(f"protocol.pairs: no domain is called '{name}'; {nearest(name, data.domains)}")
            pair = _pair_name(labelled, unlabelled)
            if pair in named:
                raise UserError(
                    f"protocol.pairs: '{pair}' is given twice, or two pairs have this name; remove one, or rename a "
                    "site"
                )
            named[pair] = labelled, unlabelled
        return named

    @classmethod
    def extent_of(cls, targets: Sequence[str], seeds: Sequence[int], pairs: Sides) -> dict[str, Any]:
        """The pairs and the number of splits of runs that exist."""
        return {"splits": max(seeds) + 1, "pairs": [list(pair) for pair in pairs.values()]}

    def roles_of(self, data: DataSet, target: str) -> Roles:
        """The labelled and the unlabelled sites of a pair, in the order of the data."""
        labelled, unlabelled = self._named_pairs(data)[target]
        return (
            tuple(name for name in data.domains if name in labelled),
            tuple(name for name in data.domains if name in unlabelled),
        )

    def split_of(self, data: DataSet, target: str, seed: int) -> Split:
        """Labelled sites train on some rows and are measured on the others. Unlabelled sites use all rows for both.

        Where the data fix their test rows, every site trains on the others and is measured on these.
        """
        labelled, unlabelled = self.roles_of(data, target)
        if lacking := next((name for name in (*labelled, *unlabelled) if name in data.unlabelled), None):
            raise UserError(
                f"protocol.kind: {self.kind} measures all sites, and '{lacking}' lacks labels (data.site_labels): use "
                "adapt_to_one or leave_one_out, or leave the site out"
            )
        train, held_out = {}, {}
        for name in labelled:
            domain = data.domains[name]
            kind = split_kind(domain, "auto" if domain.fixed_split else "random")
            train[name], held_out[name] = part_rows(domain, self.labelled_test_fraction, seed, kind)
            if len(train[name]) == 0 or len(held_out[name]) == 0:
                check_groups(data, name)
                raise UserError(
                    f"protocol: labelled site '{name}' has {len(domain)} sample(s), {len(train[name])} to train on and "
                    f"{len(held_out[name])} to be measured on; change protocol.labelled_test_fraction or leave it out"
                )
        used, measured = {}, {}
        for name in unlabelled:
            domain = data.domains[name]
            whole = np.arange(len(domain), dtype=np.int64)
            used[name], measured[name] = (
                part_rows(domain, 0, seed, "official") if domain.fixed_split else (whole, whole)
            )
        return Split(train, held_out, measured, used)

    def check_method(self, method: Method) -> None:
        """Check that a method that adapts to one target is given one."""
        item = method.traits.target in ("one unlabelled", "labelled")
        if item and self.pairs != "all" and any(len(unlabelled) > 1 for _, unlabelled in self.pairs):
            raise UserError(
                f"methods: {method.display} adapts to one target, but protocol.pairs has a pair with several "
                "unlabelled sites; give pairs with one, or choose a method for several, such as mdfnet"
            )


def _pair_name(labelled: Sequence[str], unlabelled: Sequence[str]) -> str:
    return f"{'+'.join(labelled)}-{'+'.join(unlabelled)}"


def _pair(pair: object) -> Roles:
    """(labelled, unlabelled) site names."""
    sides = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
    if len(sides) != 2:
        raise ValueError("a pair is [labelled, unlabelled], such as [a, b] or [[a, b], c]")
    labelled, unlabelled = ((side,) if isinstance(side, str) else tuple(side or ()) for side in sides)
    for names, role in ((labelled, "labelled"), (unlabelled, "unlabelled")):
        if not names:
            raise ValueError(f"a pair has no {role} site; [labelled, unlabelled] needs at least one of each")
    both = [*labelled, *unlabelled]
    twice = next((name for name in both if both.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"site '{twice}' occurs twice in a pair")
    return labelled, unlabelled
