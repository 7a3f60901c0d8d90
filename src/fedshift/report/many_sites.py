"""What `fedshift check` says of many sites: what they have in common in a few rows, and which of them are unlike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedshift.experiment.check import DomainCheck
from fedshift.report.folding import Folded
from fedshift.text import join_names

FEW = 20
"""So many sites have a row each."""
_NUMBERS: Mapping[str, Callable[[DomainCheck], int]] = {
    "samples": lambda domain: domain.samples,
    "trains": lambda domain: domain.train,
    "held out": lambda domain: domain.held_out,
    "measured as target": lambda domain: domain.measured_as_target,
}


def domain_table(domains: Sequence[DomainCheck]) -> Folded:
    """A row for each domain; of many the fewest, the median and the most samples of any."""
    if len(domains) <= FEW:
        rows = [
            [domain.name, *(str(of(domain)) for of in _NUMBERS.values()), ", ".join(domain.missing)]
            for domain in domains
        ]
        return Folded(("domain", *_NUMBERS, "without samples of"), rows, words=(len(_NUMBERS) + 1,))
    columns = [[of(domain) for domain in domains] for of in _NUMBERS.values()]
    parts: dict[str, Callable[[list[int]], int]] = {"fewest": min, "median": statistics.median_low, "most": max}
    return Folded(
        (f"{len(domains)} domains", *_NUMBERS),
        [[name, *(str(part(column)) for column in columns)] for name, part in parts.items()],
    )


def unlike(domains: Sequence[DomainCheck]) -> Iterator[str]:
    """What the rows of few domains show and those of many do not: who has the fewest samples, or none of a class."""
    if len(domains) <= FEW:
        return
    for heading in ("samples", "held out"):
        of = _NUMBERS[heading]
        numbers = [of(domain) for domain in domains if of(domain)]
        fewest = min(numbers, default=0)
        if numbers and fewest < max(numbers):
            with_fewest = [domain.name for domain in domains if of(domain) == fewest]
            yield f"  fewest {heading}, {fewest}: {join_names(with_fewest)}"
    without: dict[str, Callable[[DomainCheck], bool]] = {
        "that do not train": lambda domain: domain.train == 0,
        "that hold nothing out": lambda domain: domain.train > 0 and domain.held_out == 0,
    }
    for what, holds in without.items():
        if names := [domain.name for domain in domains if holds(domain)]:
            yield f"  {what}: {join_names(names)}"
    for name in dict.fromkeys(name for domain in domains for name in domain.missing):
        lacking = [domain.name for domain in domains if name in domain.missing]
        yield f"  without samples of {name}: {join_names(lacking)}"


def without_labels(domains: Sequence[DomainCheck]) -> Iterator[str]:
    """Where samples have no label, and how many: a line for each of a few domains, or one for all."""
    lacking = [domain for domain in domains if domain.without_label]
    if len(lacking) <= FEW:
        for domain in lacking:
            what = (
                "not measured"
                if domain.without_label == domain.samples
                else f"{domain.measured_as_target} samples measured"
            )
            yield f"{domain.name}: {domain.without_label} samples without labels, which no source trains on; {what}"
        return
    samples = sum(domain.without_label for domain in lacking)
    names = join_names([domain.name for domain in lacking])
    yield f"{samples} samples without labels, which no source trains on: {names}"
    if bare := [domain.name for domain in lacking if domain.without_label == domain.samples]:
        yield f"not measured, without any label: {join_names(bare)}"


def missing_cells_of(column: str, sites: Mapping[str, tuple[int, int]]) -> str:
    """How many cells of a column are missing at each site; of many sites those with the largest shares.

    ``sites``: site → its missing cells and its rows.
    """
    some = {site: counts for site, counts in sites.items() if counts[0]}
    shown = sorted(some, key=lambda site: -some[site][0] / some[site][1]) if len(some) > FEW else [*some]
    counts = join_names([f"{site} {some[site][0]} of {some[site][1]}" for site in shown])
    if len(some) <= FEW:
        return f"missing in column {column}: {counts}"
    cells, rows = sum(cells_missing for cells_missing, _ in sites.values()), sum(whole for _, whole in sites.values())
    return f"missing in column {column}: {cells} of {rows} at {len(some)} of {len(sites)} sites; most at {counts}"


def privacy_rows(spent: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """ε of a run and of all runs for each site; of many, where they are least and most. ``spent``: site → both."""
    if len(spent) > FEW:
        least, most = min(spent, key=lambda site: spent[site]), max(spent, key=lambda site: spent[site])
        spent = {f"{len(spent)} sites, least ({least})": spent[least], f"most ({most})": spent[most]}
    return [[site, *(f"{epsilon:.2f}" for epsilon in both)] for site, both in spent.items()]
