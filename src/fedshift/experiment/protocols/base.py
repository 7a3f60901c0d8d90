"""What every protocol answers, and what it needs to be deployed. No torch: the report asks the protocol of a record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field

from fedshift.data.domain import DataSet, Domain, Rows
from fedshift.errors import UserError
from fedshift.evaluation.summary import AVERAGE
from fedshift.files import names_a_folder
from fedshift.section import Sparing

if TYPE_CHECKING:  # these need torch
    from fedshift.methods.base import Method
    from fedshift.methods.composition.new_site import NewSite

EVERY_SITE = "sites"
"""The target that leaves no site out: all train, and the model is measured on the samples that they hold out."""
Roles = tuple[tuple[str, ...], tuple[str, ...]]
"""The sources of a run, and its targets."""
Sides = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Target → its labelled and its unlabelled sites."""
SitesPerRound = Annotated[int, Field(strict=True, ge=1)] | Annotated[float, Field(strict=True, gt=0, lt=1)]


@dataclass(frozen=True)
class Split:
    """Rows of one (target, seed), by site.

    Args:
        train: rows that each source trains on.
        held_out: rows that each source holds out; may be empty.
        measured: rows that each target is measured on.
        unlabelled: rows that each target trains on without labels.
        predicted: rows of targets that have no labels: models answer there, and are not measured.
        common: rows of test sets that measure the model beside the targets, and that no one trains on.
    """

    train: Mapping[str, Rows]
    held_out: Mapping[str, Rows]
    measured: Mapping[str, Rows]
    unlabelled: Mapping[str, Rows] = field(default_factory=dict)
    predicted: Mapping[str, Rows] = field(default_factory=dict)
    common: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets, measured or not."""
        return tuple(dict.fromkeys((*self.measured, *self.predicted)))


class ProtocolSection(Sparing):
    """Base of the protocols: the fields that all have, and the questions that the rest of fedshift asks them."""

    later: ClassVar[tuple[str, ...]] = ("sites_per_round",)

    question: ClassVar[str]  # what an experiment under the protocol asks, in words
    next_target: ClassVar[str] = "site"  # what the next site is one of that its answer holds for, in words
    unseen: ClassVar[bool] = False  # whether a target takes no part in training
    # whether methods are compared at sources and targets alike, by the harmonic mean of the two
    both_sides: ClassVar[bool] = False
    # whether one run measures each site by itself, with the site's own model where a method keeps one there
    by_site: ClassVar[bool] = False
    # fields that say which runs an experiment has. They are not settings of a single run
    extent: ClassVar[tuple[str, ...]]

    kind: str = Field(description="the protocol")
    sites_per_round: SitesPerRound | None = Field(
        None, description="sources that are drawn for each round: a number, or a share below 1; none: all take part"
    )

    def number_drawn(self, sources: int) -> int | None:
        """How many of the ``sources`` of a run are drawn for each round; None: all take part."""
        asked = self.sites_per_round
        return asked if asked is None or isinstance(asked, int) else max(1, round(asked * sources))

    # Which runs there are.

    @property
    @abstractmethod
    def named_targets(self) -> tuple[str, ...]:
        """The targets that the file names; empty where they are all that the data have."""

    @abstractmethod
    def targets_of(self, data: DataSet) -> tuple[str, ...]:
        """The targets, in order; each is the name of a domain, of a pair, or `EVERY_SITE`.

        Raises:
            UserError: a target does not exist or is named twice, the data have one domain only, or a domain's name
                cannot name a folder.
        """

    def possible_targets(self, data: DataSet) -> tuple[str, ...]:
        """Targets under which every domain can be described, also one that the experiment leaves out as a target."""
        return tuple(data.domains)

    def described_at(self, data: DataSet, name: str, roles: Callable[[str], Roles]) -> tuple[str | None, str | None]:
        """Targets under which a domain is described as a source, and as a target; None where it never is one.

        ``roles`` gives `roles_of` each target.
        """
        targets = self.possible_targets(data)
        as_source = next((target for target in targets if name in roles(target)[0]), None)
        return as_source, next((target for target in targets if name in roles(target)[1]), None)

    @classmethod
    @abstractmethod
    def extent_of(cls, targets: Sequence[str], seeds: Sequence[int], pairs: Sides) -> dict[str, Any]:
        """The fields of `extent` for runs that exist, whose targets have these ``pairs`` of sites."""

    # Who plays which part, on which rows.

    @property
    def left_out(self) -> tuple[str, ...]:
        """Domains that do not take part."""
        return ()

    @property
    def cuts_sources(self) -> bool:
        """Whether the samples of a source are given to several sites."""
        return False

    @property
    def holds_out(self) -> bool:
        """Whether sources hold samples out."""
        return True

    def taking_part(self, data: DataSet) -> DataSet:
        """The data without the domains that are left out, and with sources cut into sites where the protocol says so.

        UserError if a field names a domain that does not exist, or fields contradict each other on these data.
        """
        return data

    @abstractmethod
    def roles_of(self, data: DataSet, target: str) -> Roles:
        """The sources and the targets of the runs with a target of `targets_of`, in the order of the data."""

    @abstractmethod
    def split_of(self, data: DataSet, target: str, seed: int) -> Split:
        """The rows of one (target, seed). They are the same for every method.

        UserError if a source has no sample to train on, or the target has none to be measured on.
        """

    def measured_at(self, data: DataSet, target: str, site: str, seed: int) -> int:
        """How many rows of a site are measured where it is the target, or one of them: those of `split_of`."""
        return len(self.split_of(data, target, seed).measured.get(site, ()))

    def with_wrong_labels(self, data: DataSet, split: Split, seed: int) -> DataSet:
        """The data as sites train on them: with a share of wrong labels at malicious sources. Held-out labels are true.

        UserError if the labels are no classes.
        """
        return data

    # What is measured, and with which methods.

    def rows_to_compare(self, split: Split) -> tuple[Mapping[str, Rows], ...]:
        """The rows that methods are compared on, by site: of each side that counts."""
        return (split.measured, split.held_out) if self.both_sides else (split.measured,)

    def new_site_of(self, method: Method, input_shape: tuple[int, ...], split: Split | None = None) -> NewSite | None:
        """How a method's network adapts to an unseen target before it predicts there; None where no target is unseen.

        ``split``: of the run, in which targets may have trained; None: they have not.
        """
        unseen = self.unseen and (split is None or not set(split.targets) <= set(split.train))
        return method.at_sites(input_shape).new_site if unseen else None

    def check_method(self, method: Method) -> None:
        """Check that a method has the sites that it expects. UserError if it has not."""

    # What else can be done with it.

    def for_search(self, out: Sequence[str]) -> Self:
        """The protocol of a search, in which each source in turn is the target and ``out`` is never read.

        UserError if no source can be left out.
        """
        raise UserError(f"protocol.kind: a search leaves sources out, and {self.kind} does not: use leave_one_out")

    def for_deployment(self) -> DeployedProtocol:
        """The same protocol, if sites on other machines can carry it out. UserError if they cannot."""
        raise UserError(f"protocol.kind: {self.kind} is a simulation; deploy leave_one_out or adapt_to_one")


class DeployedProtocol(ProtocolSection):
    """A protocol that can be deployed: what the coordinator asks of it, who knows the sites' counts and no samples."""

    @abstractmethod
    def split_rule(self) -> dict[str, Any]:
        """How every site splits its samples, as they are told."""

    @abstractmethod
    def targets_among(self, sites: tuple[str, ...], at_coordinator: tuple[str, ...]) -> tuple[str, ...]:
        """The targets of a deployment.

        ``at_coordinator``: domains whose samples lie at the coordinator. UserError if a target does not exist or cannot
        take part.
        """

    @abstractmethod
    def domain_rows(self, domain: Domain, seed: int) -> tuple[Rows, Rows]:
        """The training and the held-out rows of one domain. They do not depend on other domains."""

    def of_counts(self, train: Mapping[str, Rows], held_out: Mapping[str, Rows]) -> Split:
        """The parts of `EVERY_SITE`: all sites train, and are measured on what they hold out."""
        return Split(train, held_out, {name: rows for name, rows in held_out.items() if len(rows)})

    def measures_all(self, grouped: bool) -> bool:
        """Whether an unseen target is measured on all its samples, not on those that it would hold out.

        ``grouped``: whether some of its samples belong together.
        """
        return not grouped

    def measured_rows(self, domain: Domain, held_out: Rows) -> Rows:
        """The rows that a target is measured on, of which it would hold ``held_out`` out.

        UserError if there are none.
        """
        return held_out


def check_names(kind: str, data: DataSet) -> None:
    """Check that the domains can be targets of a protocol of this kind.

    UserError if there is one domain only, or one whose name can name no folder, or no column of a table.
    """
    if len(data.domains) < 2:
        raise UserError(f"data: {kind} needs at least 2 domains, but there is only '{next(iter(data.domains))}'")
    for name in data.domains:
        if not names_a_folder(name):
            raise UserError(
                f"data: site '{name[:80]}' cannot name a folder (no '/', no '\\', no '.' at the beginning, at most 255 "
                "bytes); rename it"
            )
        if name == AVERAGE:
            raise UserError(f"data: a site cannot be called '{AVERAGE}', the name of a column in tables; rename it")


def check_groups(data: DataSet, name: str) -> None:
    """Check that a site can be split: not all its samples are in one group, which no fraction could divide.

    UserError if they are.
    """
    groups = data.domains[name].groups
    if groups is None or len(groups) < 2 or (groups != groups[0]).any():
        return
    if data.name == "image_folder":
        raise UserError(
            f"all {len(groups)} images of site '{name}' have the same patient ID, so the site cannot be split: set "
            "data.patient to study, series or file if the export gave one ID to all, or leave the site out"
        )
    raise UserError(
        f"all {len(groups)} samples of site '{name}' are in one group, so the site cannot be split: give it several "
        "groups or none, or leave the site out"
    )
