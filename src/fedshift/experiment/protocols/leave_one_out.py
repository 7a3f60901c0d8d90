"""Each domain in turn takes no part, and is measured: how a model does at a new site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from fedshift.data.domain import DataSet, Domain, Rows
from fedshift.errors import UserError
from fedshift.experiment.protocols.base import check_groups
from fedshift.experiment.protocols.one_target import OneTarget

if TYPE_CHECKING:  # it needs torch
    from fedshift.methods.base import Method


class LeaveOneOut(OneTarget):
    """Each chosen domain in turn is unseen; all others are sources. This measures how a model does at a new site."""

    question: ClassVar[str] = (
        "Does it work at a new site? Each target in turn took no part in training and was only tested."
    )
    unseen: ClassVar[bool] = True

    kind: Literal["leave_one_out"] = Field("leave_one_out", description="the protocol")
    base_images: Literal["disjoint", "shared"] = Field(
        "disjoint",
        description="for domains made from the same base samples: measure the target only on base samples that no "
        "source trained on (disjoint), or on all (shared, as the literature seems to do)",
    )

    def check_method(self, method: Method) -> None:
        """Check that a method needs no target that takes part."""
        if method.traits.needs_target:
            raise UserError(
                f"methods: {method.display} adapts to a target that takes part without labels; write protocol: "
                "{kind: adapt_to_one, …} or source_target"
            )

    def measures_all(self, grouped: bool) -> bool:
        """Whether a target is measured on all its samples: where none belong together, or where it may be."""
        return not grouped or self.base_images == "shared"

    def measured_rows(self, domain: Domain, held_out: Rows) -> Rows:
        """All rows of the target, or those of base samples that no source trained on.

        Of a split that the data fix, the test rows.
        """
        if domain.fixed_split:
            return held_out
        if self.measures_all(domain.groups is not None):
            return np.arange(len(domain), dtype=np.int64)
        if self.test_fraction == 0:
            raise UserError(
                "protocol.test_fraction: 0 leaves no base sample to test the target on; choose a fraction, or write "
                "base_images: shared to test on base samples that the sources trained on"
            )
        if len(held_out) == 0:
            raise UserError(
                f"protocol: no base sample of '{domain.name}' is held out to test on; raise protocol.test_fraction or "
                "write base_images: shared"
            )
        return held_out

    def measured_at(self, data: DataSet, target: str, site: str, seed: int) -> int:
        """As in the base; rows that are measured whole need no split."""
        domain = data.domains[site]
        if not domain.unlabelled and not domain.fixed_split and self.measures_all(domain.groups is not None):
            return len(domain)
        return super().measured_at(data, target, site, seed)

    def _check_target_rows(self, data: DataSet, target: str, rows: tuple[Rows, Rows]) -> None:
        if len(rows[1]) == 0 and self.base_images != "shared":
            check_groups(data, target)

    def for_search(self, out: Sequence[str]) -> Self:
        """The protocol of a search, in which each source in turn is the target and ``out`` is never read."""
        return self.model_copy(update={"targets": "all", "drop": tuple(dict.fromkeys((*self.drop, *out)))})
