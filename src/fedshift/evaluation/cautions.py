"""Warnings that follow from what was measured: what a table alone would hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from fedshift.evaluation.records import RunResult, SiteMetrics

_RATES_APART = 25.0
"""Percentage points between a class's shares at two sites from which they differ in rate."""
_ENOUGH = 30
"""Samples of a site from which its shares are compared with those of others."""


def cautions(results: Sequence[RunResult]) -> list[str]:
    """Warnings about methods below the majority class, targets of one class, and classes whose rate differs by site.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=9, support=[9, 0], values={"accuracy": 100.0})
        >>> run = RunResult.model_construct(method="m", target="a", classes=["cat", "dog"], selected={}, sites=[site])
        >>> print(*cautions([run]))
        measured on one class only, so nothing shows whether the model tells classes apart: a (cat)
    """
    return [*_below_majority(results), *_one_class(results), *_rates(results)]


def warnings_of(results: Sequence[RunResult]) -> list[str]:
    """`cautions`, then what the runs themselves warned of, each once.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=2, support=[1, 1], values={})
        >>> run = RunResult.model_construct(method="m", target="a", classes=["cat", "dog"], selected={}, sites=[site])
        >>> warnings_of([run.model_copy(update={"seed": seed, "warnings": ["few samples"]}) for seed in (0, 1)])
        ['few samples']
    """
    said = (warning for result in results if result.sites for warning in result.warnings)
    return list(dict.fromkeys([*cautions(results), *said]))


def majorities(results: Sequence[RunResult]) -> dict[str, float]:
    """Target → share of its most frequent class in percent, mean over runs, where records say it.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=10, support=[9, 1], values={})
        >>> majorities([RunResult.model_construct(target="a", sites=[site])])
        {'a': 90.0}
    """
    found: dict[str, list[float]] = {}
    for result in results:
        shares = [site.majority for site in result.targets if site.majority is not None]
        if shares and len(shares) == len(result.targets):
            found.setdefault(result.target, []).append(fmean(shares))
    return {target: fmean(shares) for target, shares in found.items()}


def _below_majority(results: Sequence[RunResult]) -> Iterator[str]:
    majority = majorities(results)
    for method in dict.fromkeys(result.method for result in results):
        below = []
        for target, share in majority.items():
            runs = [result for result in results if (result.method, result.target) == (method, target)]
            found = [value for run in runs if (value := run.accuracy()) is not None]
            if found and fmean(found) < share:
                below.append(f"{target} ({fmean(found):.2f} < {share:.2f})")
        if below:
            yield f"{method} is less accurate than always saying the most frequent class at {', '.join(below)}"


def _one_class(results: Sequence[RunResult]) -> Iterator[str]:
    named: dict[str, None] = {}
    for result in results:
        for site in result.targets:
            if max((count or 0 for count in site.support), default=0) == site.samples:
                named.setdefault(f"{site.site} ({result.classes[site.support.index(site.samples)]})")
    if named:
        listing = ", ".join(named)
        yield f"measured on one class only, so nothing shows whether the model tells classes apart: {listing}"


def _rates(results: Sequence[RunResult]) -> Iterator[str]:
    """The class whose share differs most between two sites, if it differs by much."""
    if not results or any(result.classes != results[0].classes for result in results):
        return
    sites: dict[str, SiteMetrics] = {}
    for result in results:
        for site in result.sites:
            known = sites.get(site.site)
            if None not in site.support and (known is None or site.samples > known.samples):
                sites[site.site] = site
    shares = {
        name: [100.0 * (count or 0) / site.samples for count in site.support]
        for name, site in sites.items()
        if site.samples >= _ENOUGH
    }
    if len(shares) < 2:
        return
    gaps = []
    for number, label in enumerate(results[0].classes):
        low, high = (choose(shares, key=lambda name: shares[name][number]) for choose in (min, max))
        gaps.append((shares[high][number] - shares[low][number], label, low, high, number))
    gap, label, low, high, number = max(gaps)
    if gap > _RATES_APART:
        yield (
            f"labels differ in rate between sites: {label} is {shares[low][number]:.1f} % of the samples at {low} and "
            f"{shares[high][number]:.1f} % at {high}"
        )
