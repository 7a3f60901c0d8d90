"""Sites of a user's own data that have no labels, or few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field, PrivateAttr

from fedshift.data.domain import UNKNOWN, DataSource, Domain, part_of
from fedshift.errors import UserError, nearest
from fedshift.section import Sparing

Labels = Annotated[
    Literal["none", "few", "few_train"], BeforeValidator(lambda value: "none" if value is None else value)
]
"""What a site has of labels."""
T = TypeVar("T")


def labelled_name(site: str) -> str:
    """What the labelled samples of a site are called that train.

    Example:
        >>> labelled_name("va")
        'va.labelled'
    """
    return f"{site}.labelled"


class SiteLabels(DataSource, Sparing):
    """Base of the data sets of which some sites may lack labels."""

    site_labels: dict[str, Labels] = Field(
        default_factory=dict,
        description="site: none, it has no labels, so it can only be a target, and is not measured; few, its labelled "
        "samples measure models and train none; few_train, they train, as a site of their own, and measure none",
    )

    later: ClassVar[tuple[str, ...]] = ("site_labels",)
    _elsewhere: tuple[str, ...] = PrivateAttr(())
    _part: str | None = PrivateAttr(None)

    def of_federation(self, classes: tuple[str, ...], part: str | None = None) -> Self:
        """The data of a site without labels, where the sites with labels are elsewhere.

        ``part``: of ``few_train``, which of its two parts gives its sums here; None: there is one.
        """
        alone = self.model_copy()
        alone._elsewhere, alone._part = classes, part
        return alone

    @property
    def held_part(self) -> str | None:
        """Of ``few_train``, the part that a deployed site holds; None: all."""
        return self._part

    def part_names(self, sites: Iterable[str]) -> tuple[str, ...]:
        """The names of sites, and after each of ``few_train`` that of its labelled samples."""
        few = {site for site, labels in self.site_labels.items() if labels == "few_train"}
        return tuple(name for site in sites for name in ((site, labelled_name(site)) if site in few else (site,)))

    def giving(self, parts: Mapping[str, T]) -> dict[str, T]:
        """Those of the parts whose sums are known here: at a deployed site its own alone."""
        return dict(parts) if self._part is None else {self._part: parts[self._part]}

    def check_site_labels(self, sites: Mapping[str, object], *, classes: bool = True) -> None:
        """Raise UserError where ``site_labels`` names no site, all sites, or a task without classes."""
        for site in self.site_labels:
            if site not in sites:
                raise UserError(f"data.site_labels: there is no site '{site}'; {nearest(site, sites)}")
        if self.site_labels and not classes:
            raise UserError("data.site_labels: only labels that are classes may be missing: leave the site out")
        if self.site_labels and not self._elsewhere and not self.labelled_sites(sites):
            raise UserError("data.site_labels: no site is left that has labels, and models learn from these")

    def labelled_sites(self, sites: Mapping[str, object]) -> tuple[str, ...]:
        """The sites whose samples all have labels."""
        return tuple(site for site in sites if site not in self.site_labels)

    def by_labels(self, domains: Mapping[str, Domain]) -> dict[str, Domain]:
        """The domains, marked where they lack labels; of ``few_train`` the labelled samples are a domain of their own.

        UserError if a site has more or fewer labels than ``site_labels`` says, or two domains have one name.
        """
        parts: dict[str, Domain] = {}
        for site, domain in domains.items():
            labels = self.site_labels.get(site)
            if labels in ("few", "few_train"):
                _check_few(site, domain)
            if labels != "few_train":
                parts[site] = domain if labels is None else replace(domain, unlabelled=True)
                continue
            name = labelled_name(site)
            if name in domains:
                raise UserError(f"data.site_labels: the labelled samples of '{site}' would be called '{name}': rename")
            rest = np.flatnonzero(domain.labels == UNKNOWN)
            parts[site] = replace(part_of(domain, rest, site), unlabelled=True)
            parts[name] = replace(part_of(domain, domain.known, name), only_source=True)
        return parts


def _check_few(site: str, domain: Domain) -> None:
    known = len(domain.known)
    if known == 0:
        raise UserError(f"data.site_labels: no sample of '{site}' has a label: write {site}: none")
    if known == len(domain):
        raise UserError(f"data.site_labels: every sample of '{site}' has a label: leave it out of site_labels")
    if domain.fixed_split:
        raise UserError(f"data.site_labels: '{site}' has few labels and a fixed split: leave one of them out")


def unread(site: str, what: str, remedy: str = "leave the site out of site_labels to use them") -> str:
    """A warning of a site that has labels and is said to have none."""
    return f"site '{site}' has {what}, which are not read, since data.site_labels says none: {remedy}"


def unknown_labels(samples: int) -> np.typing.NDArray[np.int64]:
    """The labels of samples that have none, (samples,)."""
    return np.full(samples, UNKNOWN, dtype=np.int64)
