"""Ordinary federated learning: all sites train, and each is measured on its own test part. No target is unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from fedshift.data.domain import DataSet, Domain, Rows, part_of
from fedshift.data.splits import cut, part_rows
from fedshift.errors import UserError
from fedshift.experiment.protocols.base import (
    EVERY_SITE,
    DeployedProtocol,
    Roles,
    Sides,
    Split,
    check_groups,
    check_names,
)
from fedshift.experiment.protocols.one_target import OneTarget, check_known

if TYPE_CHECKING:  # it needs torch
    from fedshift.methods.base import Method


class Participants(OneTarget):
    """All sites train, and each is measured on its own test part. This measures whether taking part pays for each.

    A site whose method keeps a model of its own there is measured with that model. Common test sets are domains that
    no one trains on; they measure the model, too.
    """

    later: ClassVar[tuple[str, ...]] = (*OneTarget.later, "targets")

    question: ClassVar[str] = (
        "Does it pay for each of you? All sites trained, and each was measured on test samples of its own."
    )
    unseen: ClassVar[bool] = True
    by_site: ClassVar[bool] = True
    extent: ClassVar[tuple[str, ...]] = ("seeds",)

    kind: Literal["participants"] = Field("participants", description="the protocol")
    targets: Literal["all"] = Field("all", description="all: there is no target, and every site takes part")
    common_tests: tuple[str, ...] = Field(
        (), description="domains that no one trains on and that measure the model, each with a column of its own"
    )
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0, description="share of a site's training samples that it holds out to choose the round; 0: the last round"
    )

    @field_validator("common_tests", mode="before")
    @classmethod
    def _one_test(cls, tests: object) -> object:
        return (tests,) if isinstance(tests, str) else tests

    @property
    def named_targets(self) -> tuple[str, ...]:
        """All sites together."""
        return (EVERY_SITE,)

    @property
    def holds_out(self) -> bool:
        """Whether a round can be chosen by samples on which no one trains or is measured."""
        return self.validation_fraction > 0

    def targets_of(self, data: DataSet) -> tuple[str, ...]:
        """All sites together."""
        check_names(self.kind, data)
        if not self.roles_of(data, EVERY_SITE)[0]:
            raise UserError("protocol.common_tests: no site is left to train: leave some out of it")
        return (EVERY_SITE,)

    def possible_targets(self, data: DataSet) -> tuple[str, ...]:
        """All sites together."""
        return (EVERY_SITE,)

    def described_at(self, data: DataSet, name: str, roles: Callable[[str], Roles]) -> tuple[str | None, str | None]:
        """All sites together, for those that train and for those that measure."""
        domain = data.domains[name]
        tests = name in self.common_tests or domain.unlabelled or _only_tests(domain)
        return None if tests else EVERY_SITE, EVERY_SITE

    def targets_among(self, sites: tuple[str, ...], at_coordinator: tuple[str, ...]) -> tuple[str, ...]:
        """All sites together."""
        return (EVERY_SITE,)

    @classmethod
    def extent_of(cls, targets: Sequence[str], seeds: Sequence[int], pairs: Sides) -> dict[str, Any]:
        """The seeds of runs that exist."""
        return {"seeds": seeds}

    def check_method(self, method: Method) -> None:
        """Check that a method needs no target without labels."""
        if method.traits.needs_target or method.traits.target == "labelled":
            raise UserError(
                f"methods: {method.display} needs a target, and {self.kind} has none: leave it out, or write "
                "protocol.kind: adapt_to_one"
            )

    def _check_named(self, data: DataSet) -> None:
        super()._check_named(data)
        check_known("common_tests", self.common_tests, data)
        if both := next((name for name in self.common_tests if name in self.drop), None):
            raise UserError(f"protocol.common_tests: '{both}' is in protocol.drop, too: leave it out of one")

    def _whole(self, domains: Mapping[str, Domain]) -> tuple[str, ...]:
        """Common test sets, and what lacks labels or only tests."""
        return tuple(
            name
            for name, domain in domains.items()
            if name in self.common_tests or domain.unlabelled or _only_tests(domain)
        )

    def _cut(self, domains: Mapping[str, Domain]) -> dict[str, Domain]:
        """The domains, the sites cut; common test sets stay whole."""
        result: dict[str, Domain] = {}
        for name, domain in domains.items():
            parts = (
                [domain] if name in self.common_tests else cut(domain, self.sites_each, self.cut_by, self.label_skew)
            )
            for part in parts:
                if part.name in result or (part is not domain and part.name in domains):
                    raise UserError(
                        f"protocol.sites_each: a part of '{name}' would be called '{part.name}', as a site: rename it"
                    )
                result[part.name] = part
        return result

    def roles_of(self, data: DataSet, target: str) -> Roles:
        """All sites that have labels and training samples, and the name of all sites together."""
        named = {name: domain for name, domain in data.domains.items() if name not in self.common_tests}
        return tuple(name for name, domain in named.items() if not domain.unlabelled and not _only_tests(domain)), (
            EVERY_SITE,
        )

    def split_of(self, data: DataSet, target: str, seed: int) -> Split:
        """What each site trains on, what it is measured on, and the common test sets.

        Raises:
            UserError: a site has no training samples, no site has test samples, or of a common test set no sample is
                left that no site trains on.
        """
        train, held_out, measured = {}, {}, {}
        for name in self.roles_of(data, target)[0]:
            train[name], measured[name] = self.domain_rows(data.domains[name], seed)
            held_out[name] = train[name][:0]
            if self.validation_fraction:
                train[name], held_out[name] = self._take_validation(data.domains[name], train[name], seed)
            if len(train[name]) == 0:
                check_groups(data, name)
                raise UserError(
                    f"protocol: site '{name}' has no training samples left; lower protocol.test_fraction, or name it "
                    "in protocol.common_tests"
                )
        measured = {name: rows for name, rows in measured.items() if len(rows)}
        common = self._common(data, train)
        if not measured:
            measured, common = common, {}
        if not measured:
            raise UserError(
                "protocol.test_fraction: no site has a test sample to measure the model on; raise it, or name "
                "protocol.common_tests"
            )
        return Split(train, held_out, measured, common=common)

    def measured_at(self, data: DataSet, target: str, site: str, seed: int) -> int:
        """How many rows of a site measure the model: as test part, or as a common test set."""
        domain = data.domains[site]
        if site in self.common_tests or _only_tests(domain):
            return len(self._test_rows(domain))
        return 0 if domain.unlabelled else len(self.domain_rows(domain, seed)[1])

    def _take_validation(self, domain: Domain, train: Rows, seed: int) -> tuple[Rows, Rows]:
        """The training rows of a domain, without those by which the round is chosen; and these."""
        part = replace(part_of(domain, train, domain.name), train_rows=None, test_rows=None, fixed_split=False)
        kept, chosen = part_rows(part, self.validation_fraction, seed, "random")
        return train[kept], train[chosen]

    def _test_rows(self, domain: Domain) -> Rows:
        """The rows of a domain that no one trains on: all with a label, or the test rows of a fixed split."""
        return domain.test_rows if domain.fixed_split and domain.test_rows is not None else domain.known

    def _common(self, data: DataSet, train: Mapping[str, Rows]) -> dict[str, Rows]:
        """The rows of each set that only tests, without base samples that a site trains on."""
        common = {
            name: self._test_rows(domain)
            for name, domain in data.domains.items()
            if name in self.common_tests or _only_tests(domain)
        }
        grouped = [groups[rows] for name, rows in train.items() if (groups := data.domains[name].groups) is not None]
        for name, rows in common.items():
            groups = data.domains[name].groups
            if groups is not None and grouped:
                common[name] = rows[~np.isin(groups[rows], np.concatenate(grouped))]
            if len(common[name]) == 0:
                raise UserError(
                    f"protocol.common_tests: '{name}' has no labelled sample that no site trains on; raise "
                    "protocol.test_fraction or leave it out"
                )
        return common

    def of_counts(self, train: Mapping[str, Rows], held_out: Mapping[str, Rows]) -> Split:
        """The parts of a deployment in which all sites train and are measured."""
        none = {name: rows[:0] for name, rows in held_out.items()}
        return Split(train, none, {name: rows for name, rows in held_out.items() if len(rows)})

    def _check_target_rows(self, data: DataSet, target: str, rows: tuple[Rows, Rows]) -> None:
        """There is no target."""

    def for_deployment(self) -> DeployedProtocol:
        """The same protocol: each site measures its own test part, with its own model where a method keeps one.

        UserError if it has parts that deployed sites do not have.
        """
        if self.common_tests:
            raise UserError("protocol.common_tests: a deployed site trains and measures its own samples: leave it out")
        if self.validation_fraction:
            raise UserError("protocol.validation_fraction: a deployed run takes its last round: leave it out")
        return self


def _only_tests(domain: Domain) -> bool:
    """Whether the data fix that no sample of a site trains."""
    return domain.fixed_split and domain.train_rows is not None and len(domain.train_rows) == 0
