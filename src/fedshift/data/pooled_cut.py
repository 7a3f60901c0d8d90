"""Sites made of pooled data: the samples of several domains, put together and dealt out again.

Three rules of the literature say who gets what. Each sample goes to one site. The same fields give the same sites,
whatever the seed of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat, PositiveInt

from fedshift.data.domain import Domain, Rows, SparseRows, part_of
from fedshift.data.splits import by_site_shares
from fedshift.errors import UserError
from fedshift.section import Section

_TRIES = 1000
"""How often a cut is drawn until its smallest site is large enough."""
Counts = npt.NDArray[np.int64]


class PooledCut(Section):
    """The field ``protocol.pool``: to how many sites, and by which rule.

    ``classes``: for each class, shares of its samples over the sites ~ Dirichlet(α, …, α); sites differ in size
    (Yurochkin et al., ICML 2019). Drawn again until the smallest site has ``smallest`` samples (Li et al., ICDE 2022).
    ``sites``: sites of equal size (± 1), each with shares of the classes ~ Dirichlet(α·p), where p are the shares in
    the pool; a class that has run out is left out (Hsu, Qi, Brown, 2019).
    ``domains``: n_dc(λ) = λ·n_d/C + (1 − λ)·n_dc(0) samples of domain d at site c of C. With λ = 1 all sites have the
    same mixture; n_dc(0) has whole domains at sites, or divided ones where there are more sites than domains (Bai,
    Bagchi, Inouye, ICLR 2024).
    """

    sites: PositiveInt = Field(description="how many sites the pooled samples make: site.1, site.2, …")
    by: Literal["classes", "sites", "domains"] = Field(
        "classes", description="the rule: Dirichlet shares of each class, Dirichlet shares at each site, or λ"
    )
    alpha: PositiveFloat = Field(0.5, description="α of classes and sites: the smaller, the more the sites differ")
    mix: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="λ of domains: 1 is the same mixture at all sites, 0 whole domains"
    )
    smallest: PositiveInt = Field(10, description="samples that every site has at least; by classes it is drawn again")

    def sites_of(self, domains: Sequence[Domain]) -> list[Domain]:
        """The sites, called site.1, site.2 and so on.

        ``domains``: what is pooled, all of one data set. UserError if there are too few samples, or these have groups,
        or no classes where these decide.
        """
        numbers = np.repeat(np.arange(len(domains)), [len(domain) for domain in domains])
        self._check(domains, len(numbers))
        generator = np.random.default_rng([18, self.sites])
        whole = pool_domains(domains)
        if self.by == "domains":
            parts = _by_counts(numbers, mixed_counts(np.bincount(numbers), self.sites, self.mix), generator)
        elif self.by == "sites":
            parts = by_site_shares(whole.labels, self.sites, self.alpha, generator)
        else:
            parts = _large_enough(whole.labels, self, generator)
        if (least := min(map(len, parts))) < self.smallest:
            raise UserError(f"protocol.pool.smallest: a site would have {least} samples: lower it, or pool.sites")
        return [part_of(whole, np.sort(rows), f"site.{number}") for number, rows in enumerate(parts, 1)]

    def _check(self, domains: Sequence[Domain], samples: int) -> None:
        if samples < self.sites * self.smallest:
            raise UserError(
                f"protocol.pool.sites: {samples} samples are not enough for {self.sites} sites of at least "
                f"{self.smallest}; lower it, or pool.smallest"
            )
        if grouped := next((domain.name for domain in domains if domain.groups is not None), None):
            raise UserError(
                f"protocol.pool: samples of '{grouped}' belong together in groups, which pooling would divide: write "
                "protocol.sites_each"
            )
        classes = all(domain.labels.dtype.kind == "i" and domain.masks is None for domain in domains)
        if self.by != "domains" and not classes:
            raise UserError("protocol.pool.by: labels that are no classes cannot decide: write domains")


def pool_domains(domains: Sequence[Domain]) -> Domain:
    """All samples of the domains in one, in their order. A split of its own stays if each of them has one."""
    starts = np.cumsum([0, *(len(domain) for domain in domains[:-1])])

    def rows_of(name: str) -> Rows | None:
        kept = [getattr(domain, name) for domain in domains]
        if any(rows is None for rows in kept):
            return None
        return np.concatenate([rows + start for rows, start in zip(kept, starts, strict=True)]).astype(np.int64)

    def join(name: str) -> Any:
        kept = [getattr(domain, name) for domain in domains]
        return None if any(values is None for values in kept) else np.concatenate(kept)

    every = [domain.ids for domain in domains]
    return replace(
        domains[0],
        name="pool",
        inputs=_inputs(domains),
        labels=np.concatenate([domain.labels for domain in domains]),
        train_rows=rows_of("train_rows"),
        test_rows=rows_of("test_rows"),
        masks=join("masks"),
        ids=None if any(ids is None for ids in every) else tuple(name for ids in every for name in ids or ()),
        fixed_split=all(domain.fixed_split for domain in domains),
    )


def _inputs(domains: Sequence[Domain]) -> Any:
    kept: list[Any] = [domain.inputs for domain in domains]
    if not isinstance(kept[0], SparseRows):
        return np.concatenate(kept)
    ends = np.cumsum([0, *(len(rows.data) for rows in kept[:-1])])
    pointers = [rows.indptr[1:] + end for rows, end in zip(kept, ends, strict=True)]
    data, indices = (np.concatenate([getattr(rows, name) for rows in kept]) for name in ("data", "indices"))
    return SparseRows(data, indices, np.concatenate([[0], *pointers]).astype(np.int64), kept[0].width)


def by_class_shares(labels: npt.NDArray[Any], sites: int, alpha: float, generator: np.random.Generator) -> list[Rows]:
    """For each class shares ~ Dirichlet(α, …, α) over the sites, and that part of its samples to each.

    ``labels``: class numbers (n,); ``generator``: draws the shares and the order of the samples.
    """
    parts: list[list[Rows]] = [[] for _ in range(sites)]
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(generator.dirichlet(np.full(sites, alpha)))[:-1] * len(rows)).astype(np.int64)
        for part, some in zip(parts, np.split(rows, ends), strict=True):
            part.append(some)
    return [np.concatenate(part) for part in parts]


def mixed_counts(sizes: Sequence[int] | Counts, sites: int, mix: float) -> Counts:
    """``n_dc(λ) = λ·n_d/C + (1 − λ)·n_dc(0)``: how many samples of each domain a site has, as whole numbers.

    n_dc(0): with at least as many sites as domains, each site has one domain; the domain with the most samples for a
    site is divided once more until there are C parts. With fewer, domains go whole, the largest first, to the site
    with the fewest samples.

    Args:
        mix: λ, in [0, 1].

    Returns:
        (D, C). Rows have the sums n_d; numbers are rounded so that each row keeps its sum.

    Example:
        >>> mixed_counts([6, 4], sites=2, mix=0.0).tolist(), mixed_counts([6, 4], sites=2, mix=1.0).tolist()
        ([[6, 0], [0, 4]], [[3, 3], [2, 2]])
    """
    totals = np.asarray(sizes, dtype=np.int64)
    wanted = mix * totals[:, None] / sites + (1 - mix) * _unmixed_counts(totals, sites)
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    for row, total, exact in zip(counts, totals, wanted, strict=True):
        row[np.argsort(row - exact, kind="stable")[: total - row.sum()]] += 1
    return counts


def _unmixed_counts(sizes: Counts, sites: int) -> Counts:
    counts = np.zeros((len(sizes), sites), dtype=np.int64)
    if sites < len(sizes):
        for domain in np.argsort(-sizes, kind="stable"):
            counts[domain, counts.sum(axis=0).argmin()] = sizes[domain]
        return counts
    parts = np.ones(len(sizes), dtype=np.int64)
    while parts.sum() < sites:
        parts[(sizes / parts).argmax()] += 1
    site = 0
    for domain, number in enumerate(parts):
        for rows in np.array_split(np.arange(sizes[domain]), number):
            counts[domain, site] = len(rows)
            site += 1
    return counts


def _by_counts(numbers: Counts, counts: Counts, generator: np.random.Generator) -> list[Rows]:
    dealt = [
        np.split(generator.permutation(np.flatnonzero(numbers == domain)), np.cumsum(row)[:-1])
        for domain, row in enumerate(counts)
    ]
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]


def _large_enough(labels: npt.NDArray[Any], cut: PooledCut, generator: np.random.Generator) -> list[Rows]:
    parts: list[Rows] = []
    for _ in range(_TRIES):
        parts = by_class_shares(labels, cut.sites, cut.alpha, generator)
        if min(map(len, parts)) >= cut.smallest:
            break
    return parts


def site_domains(cut: PooledCut, domains: Mapping[str, Domain], whole: Sequence[str]) -> dict[str, Domain]:
    """The domains that stay whole, in their order, and the sites made of all others.

    UserError as `PooledCut.sites_of`; or nothing is left to pool, or a domain is called as a site is.
    """
    rest = [domain for name, domain in domains.items() if name not in whole]
    if not rest:
        raise UserError("protocol.pool: no samples are left to pool")
    result = {name: domains[name] for name in domains if name in whole}
    for site in cut.sites_of(rest):
        if site.name in result:
            raise UserError(f"protocol.pool: a site would be called '{site.name}', as a domain is: rename it")
        result[site.name] = site
    return result
