"""Protocols in which each domain in turn is the target, and all others are sources."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from fedshift.data.domain import DataSet, Domain, Rows
from fedshift.data.pooled_cut import PooledCut, site_domains
from fedshift.data.splits import cut, part_rows, split_kind
from fedshift.errors import UserError, nearest
from fedshift.experiment.protocols.base import (
    EVERY_SITE,
    DeployedProtocol,
    Roles,
    Sides,
    Split,
    check_groups,
    check_names,
)


class OneTarget(DeployedProtocol):
    """Base of the protocols in which each domain in turn is the target."""

    later: ClassVar[tuple[str, ...]] = (*DeployedProtocol.later, "pool")

    extent: ClassVar[tuple[str, ...]] = ("targets", "seeds")

    targets: Literal["all"] | tuple[str, ...] = Field(
        "all", description="the domains that are the target in turn; sites: none is, and all train one model"
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] = Field(
        (0, 1, 2), description="a list: one run for each; a number alone is one seed, not how many"
    )
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.3, description="share of every source that is held out; 0 trains on everything and cannot select by source"
    )
    split: Literal["auto", "random", "official"] = Field(
        "auto",
        description="official: the data set's own train/test split; random: stratified; auto: official if it exists",
    )
    drop: tuple[str, ...] = Field((), description="domains that do not take part")
    sites_each: PositiveInt = Field(
        1, description="cut every source into so many sites, in a simulation with a single target; 1: not cut"
    )
    cut_by: Literal["chance", "labels"] = Field(
        "chance", description="how sources are cut: by chance, or so that the sites' classes differ"
    )
    label_skew: PositiveFloat = Field(
        0.5, description="cut_by: labels: the smaller, the more the sites' classes differ (Dirichlet)"
    )
    pool: PooledCut | None = Field(
        None, description="pool the sources' samples and deal them out to so many sites, in a simulation; none: not"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: object) -> object:
        return (targets,) if isinstance(targets, str) and targets != "all" else targets

    @field_validator("drop", mode="before")
    @classmethod
    def _one_name(cls, drop: object) -> object:
        return (drop,) if isinstance(drop, str) else drop

    @field_validator("seeds", mode="before")
    @classmethod
    def _one_seed(cls, seeds: object) -> object:
        return (seeds,) if isinstance(seeds, int) else seeds

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed occurs twice")
        return seeds

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The targets that the file names; empty where they are all that the data have."""
        return () if self.targets == "all" else self.targets

    @property
    def left_out(self) -> tuple[str, ...]:
        """Domains that do not take part."""
        return self.drop

    @property
    def cuts_sources(self) -> bool:
        """Whether the samples of a source are given to several sites."""
        return self.sites_each > 1 or self.pool is not None

    @property
    def holds_out(self) -> bool:
        """Whether sources hold samples out."""
        return self.test_fraction > 0

    def targets_of(self, data: DataSet) -> tuple[str, ...]:
        """The domains that are the target in turn, or `EVERY_SITE`."""
        check_names(self.kind, data)
        if self.targets == "all":
            return tuple(name for name, domain in data.domains.items() if not domain.only_source)
        if not self.targets:
            raise UserError("protocol.targets: name at least one domain, or write all")
        for target in self.targets:
            if target not in data.domains:
                self._check_every_site(target, data)
            elif data.domains[target].only_source:
                raise UserError(f"protocol.targets: '{target}' holds the labels that train: name the site itself")
            if self.targets.count(target) > 1:
                raise UserError(f"protocol.targets: '{target}' is named twice; name it once")
        return self.targets

    def _check_every_site(self, target: str, data: DataSet) -> None:
        """Raise UserError where what is no domain is not `EVERY_SITE`, or the protocol knows no model of all sites."""
        if target != EVERY_SITE:
            raise UserError(f"protocol.targets: no domain is called '{target}'; {nearest(target, data.domains)}")
        if not self.unseen:
            raise UserError(
                f"protocol.targets: '{EVERY_SITE}' trains one model at all sites, with their labels, and {self.kind} "
                "needs a target without: write protocol.kind: leave_one_out"
            )

    def described_at(self, data: DataSet, name: str, roles: Callable[[str], Roles]) -> tuple[str | None, str | None]:
        """As in the base, without a look at the roles of each target: many sites have many targets."""
        every = EVERY_SITE in self.named_targets
        other = EVERY_SITE if every else next((target for target in data.domains if target != name), None)
        return None if data.domains[name].unlabelled else other, name

    @classmethod
    def extent_of(cls, targets: Sequence[str], seeds: Sequence[int], pairs: Sides) -> dict[str, Any]:
        """The targets and the seeds of runs that exist."""
        return {"targets": targets, "seeds": seeds}

    def taking_part(self, data: DataSet) -> DataSet:
        """The data without the domains in ``drop``, and with the sources cut as ``sites_each`` or ``pool`` says."""
        self._check_named(data)
        if self.pool is not None and self.sites_each > 1:
            raise UserError(
                "protocol.pool: pools the sources, which protocol.sites_each cuts one by one; leave one out"
            )
        kept = {name: domain for name, domain in data.domains.items() if name not in self.drop}
        if self.pool is not None:
            return replace(data, domains=site_domains(self.pool, kept, self._whole(kept)), columns={})
        if self.cuts_sources:
            return replace(data, domains=self._cut(kept), columns={})
        columns = {name: column for name, column in data.columns.items() if name in kept}
        return replace(data, domains=kept, columns=columns) if self.drop else data

    def _check_named(self, data: DataSet) -> None:
        """Raise UserError where a field beside ``targets`` names a domain that does not exist."""
        check_known("drop", self.drop, data)

    def _whole(self, domains: Mapping[str, Domain]) -> tuple[str, ...]:
        """The domains that are not pooled: the target, and what lacks labels."""
        if len(self.named_targets) != 1:
            raise UserError("protocol.pool: name one target, such as protocol.targets: [M0]; only sources are pooled")
        return tuple(name for name, domain in domains.items() if name in self.named_targets or domain.unlabelled)

    def _cut(self, domains: Mapping[str, Domain]) -> dict[str, Domain]:
        """The domains, the sources cut into sites; the target stays whole."""
        if len(self.named_targets) != 1:
            raise UserError(
                "protocol.sites_each: name one target, such as protocol.targets: [M0]; only sources are cut"
            )
        result: dict[str, Domain] = {}
        for name, domain in domains.items():
            whole = name == self.named_targets[0]
            parts = [domain] if whole else cut(domain, self.sites_each, self.cut_by, self.label_skew)
            twice = next((part.name for part in parts if not whole and part.name in domains), None)
            if twice is not None:
                raise UserError(
                    f"protocol.sites_each: a part of '{name}' would be called '{twice}', as a site is: rename it"
                )
            result.update((part.name, part) for part in parts)
        return result

    def roles_of(self, data: DataSet, target: str) -> Roles:
        """All other domains that have labels, and the target; of `EVERY_SITE` all these are sources."""
        return tuple(name for name, domain in data.domains.items() if name != target and not domain.unlabelled), (
            target,
        )

    def domain_rows(self, domain: Domain, seed: int) -> tuple[Rows, Rows]:
        """The training and the held-out rows of one domain. They do not depend on other domains."""
        return part_rows(domain, self.test_fraction, seed, split_kind(domain, self.split))

    def measured_at(self, data: DataSet, target: str, site: str, seed: int) -> int:
        """As in the base. Rows of a domain do not depend on others, so with many sites not all are split for each."""
        if data.domains[site].unlabelled:
            return len(data.domains[site].known)
        rows = self.domain_rows(data.domains[site], seed)
        self._check_target_rows(data, site, rows)
        return len(self.measured_rows(data.domains[site], rows[1]))

    def split_of(self, data: DataSet, target: str, seed: int) -> Split:
        """The rows of one (target, seed)."""
        rows = {name: self.domain_rows(domain, seed) for name, domain in data.domains.items() if not domain.unlabelled}
        train = {name: pair[0] for name, pair in rows.items() if name != target}
        held_out = {name: pair[1] for name, pair in rows.items() if name != target}
        for name, chosen in train.items():
            if len(chosen) == 0:
                check_groups(data, name)
                raise UserError(f"protocol: site '{name}' has no training samples left; lower protocol.test_fraction")
        if target in data.unlabelled:
            return self._without_labels(data.domains[target], train, held_out)
        if target not in rows:
            measured_there = {name: chosen for name, chosen in held_out.items() if len(chosen)}
            if not measured_there:
                raise UserError("protocol.test_fraction: no site holds out a sample to measure the model on; raise it")
            return Split(train, held_out, measured_there)
        self._check_target_rows(data, target, rows[target])
        measured = {target: self.measured_rows(data.domains[target], rows[target][1])}
        return Split(train, held_out, measured, {} if self.unseen else {target: rows[target][0]})

    def _without_labels(self, domain: Domain, train: Mapping[str, Rows], held_out: Mapping[str, Rows]) -> Split:
        """The rows where the target lacks labels: what is measured there are the labelled samples, if there are any."""
        if not train:
            raise UserError(f"protocol: no site with labels is left to train for '{domain.name}'")
        known = domain.known
        rest = np.setdiff1d(np.arange(len(domain), dtype=np.int64), known)
        measured = {domain.name: known} if len(known) else {}
        return Split(train, held_out, measured, {} if self.unseen else {domain.name: rest}, {domain.name: rest})

    @abstractmethod
    def _check_target_rows(self, data: DataSet, target: str, rows: tuple[Rows, Rows]) -> None:
        """Raise UserError where a target has too few training and held-out rows for its part."""

    def for_deployment(self) -> DeployedProtocol:
        """The same protocol, which sites on other machines can carry out."""
        return self

    def split_rule(self) -> dict[str, Any]:
        """How every site splits its samples, as they are told."""
        return {"test_fraction": self.test_fraction, "split": self.split}

    def targets_among(self, sites: tuple[str, ...], at_coordinator: tuple[str, ...]) -> tuple[str, ...]:
        """The targets that the file names. ``all``: the coordinator's own domains, or every site if it has none."""
        if self.targets == "all":
            return at_coordinator if at_coordinator and self.unseen else sites
        known = (*sites, *at_coordinator)
        for target in self.targets:
            if target == EVERY_SITE and self.unseen:
                continue
            if target not in known:
                raise UserError(f"protocol.targets: no site is called '{target}'; {nearest(target, known)}")
            if target in at_coordinator and not self.unseen:
                raise UserError(
                    f"protocol.targets: '{target}' lies at the coordinator and cannot take part in training"
                )
        return self.targets


def check_known(field_name: str, names: Sequence[str] | Mapping[str, float], data: DataSet) -> None:
    """Check that every domain exists that a field names. UserError if one does not."""
    for name in names:
        if name not in data.domains:
            raise UserError(f"protocol.{field_name}: no domain is called '{name}'; {nearest(name, data.domains)}")
