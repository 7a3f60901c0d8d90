"""What looks like a mistake only when sites are compared: the same samples twice, columns in other units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import DataSet, Domain, SparseRows

_ENOUGH = 30
"""Samples of a site from which its columns are compared with those of others."""
_RATIO, _GAP = 5.0, 5.0
"""Standard deviations that differ by this factor, and means that differ by so many of them, are in other units."""
_MOST_BYTES = 256 << 20
"""Samples of more bytes than this are compared site by site only."""
_MOST_NAMED = 3
_MEASURED = 100
"""Most columns without names that can be measurements with units; where there are more, they are computed features."""


def site_differences(data: DataSet) -> tuple[str, ...]:
    """Warnings about samples that two sites share, and about numeric columns whose scale differs between sites."""
    return (*_shared(data), *_scales(data))


def _shared(data: DataSet) -> Iterator[str]:
    """The pairs of sites that share samples: one image is enough; of rows, which can be alike by chance, half."""
    domains = {name: domain for name, domain in data.domains.items() if not isinstance(domain.inputs, SparseRows)}
    small = sum(np.asarray(domain.inputs).nbytes for domain in domains.values()) <= _MOST_BYTES
    rows = {name: _fingerprints(domain) for name, domain in domains.items()} if small else {}
    for one, other in combinations(domains, 2):
        first, second = domains[one], domains[other]
        if first.groups is not None and second.groups is not None:
            continue  # these say which samples of different sites belong together
        if len(first) == len(second) and np.array_equal(np.asarray(first.inputs), np.asarray(second.inputs)):
            yield f"sites '{one}' and '{other}' hold the same samples: is it the same file twice?"
        elif small:
            both = len(rows[one] & rows[other])
            fewest = min(len(rows[one]), len(rows[other]))
            if 2 * both >= fewest or (both and data.preprocessing.kind == "image"):
                yield (
                    f"sites '{one}' and '{other}' share {both} equal samples: what trains at one is measured at the "
                    "other"
                )


def _fingerprints(domain: Domain) -> set[int]:
    inputs = np.ascontiguousarray(domain.inputs)
    return {hash(row.tobytes()) for row in inputs}


def _scales(data: DataSet) -> Iterator[str]:
    if data.preprocessing.kind == "image" or data.preprocessing.backbone is not None:
        return
    columns = {
        name: _numeric(domain.inputs, data.preprocessing.table)
        for name, domain in data.domains.items()
        if not isinstance(domain.inputs, SparseRows) and len(domain) >= _ENOUGH and domain.inputs.ndim == 2
    }
    if len(columns) < 2:
        return
    first = next(iter(columns.values()))
    if data.preprocessing.table is None and len(first) > _MEASURED:
        return
    found = [
        text for column in first if (text := _differs(column, {site: own[column] for site, own in columns.items()}))
    ]
    if found:
        more = f"; and {len(found) - _MOST_NAMED} more columns" if len(found) > _MOST_NAMED else ""
        yield f"columns differ in scale between sites, as in other units: {'; '.join(found[:_MOST_NAMED])}{more}"


def _numeric(inputs: NDArray[Any], table: Mapping[str, Any] | None) -> dict[str, NDArray[np.float64]]:
    """The numeric columns as they are in the files, without missing values."""
    if table is None:
        return {f"column {number}": values for number, values in enumerate(inputs.T.astype(np.float64))}
    out = {}
    for number, column in enumerate(table["numeric"]):
        values = inputs[:, number].astype(np.float64)
        if column["can_be_missing"]:
            values = values[values != 0]  # how a missing value is encoded
        out[str(column["name"])] = values * float(column["std"]) + float(column["mean"])
    return out


def _differs(column: str, by_site: Mapping[str, NDArray[np.float64]]) -> str:
    """The column and the two sites that differ most in it, if they do."""
    facts = {
        site: (float(values.mean()), float(values.std()))
        for site, values in by_site.items()
        # Where most values are one, such as 0, the deviation says how many are not, and nothing of units.
        if len(values) >= _ENOUGH and np.mean(values == np.median(values)) <= 0.5
    }
    spread = {site: std for site, (mean, std) in facts.items() if std > 1e-6 * abs(mean)}
    if len(spread) < 2:
        return ""
    wide, narrow = max(spread, key=spread.__getitem__), min(spread, key=spread.__getitem__)
    high, low = max(spread, key=lambda site: facts[site][0]), min(spread, key=lambda site: facts[site][0])
    if facts[high][0] - facts[low][0] > _GAP * max(spread[high], spread[low]):
        pair = high, low
    elif spread[wide] > _RATIO * spread[narrow]:
        pair = wide, narrow
    else:
        return ""
    return f"{column} is " + " and ".join(f"{facts[site][0]:.4g} ± {facts[site][1]:.3g} at {site}" for site in pair)
