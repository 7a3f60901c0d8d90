"""What looks like a mistake when samples are compared, within a site and between sites.

The same samples twice, numbers of patients at several sites, columns in other units or coded otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedshift.data.codings import (
    Column,
    Numbers,
    codes_of,
    fewer,
    missing_warnings,
    moments_of,
    named_warnings,
    number_warnings,
    numbers_of,
    scale_warnings,
)
from fedshift.data.domain import DataSet, Domain, Rows, SparseRows
from fedshift.text import join_names

_ENOUGH = 30
"""Samples of a site from which its columns are compared with those of others."""
_MOST_BYTES = 256 << 20
"""Samples of more bytes than this are compared site by site only."""
_MOST_NAMED, _MOST_PAIRS = 3, 20
_MEASURED = 100
"""Most columns without names that can be measurements with units; where there are more, they are computed features."""
_LOOKED_AT = 20_000
"""About how many rows of a site columns without names are judged by."""
_REPEATS, _REPEATED = 3, 0.02
"""Rows that repeat an earlier one, and their share of a site, from which they are reported."""
_COMPARED = 1000
"""Sites whose numeric columns are compared; of more, so many evenly among them."""
_HOLDERS = 100
"""Sites with one entry in common whose pairs are looked at: ten thousand have fifty million."""
_BY_CHANCE = 0.05
"""A row that chance would repeat more often than this is no copy."""

T = TypeVar("T")
Prints = Mapping[str, NDArray[np.int64]]
"""Site → a number for each of its samples, equal for equal ones."""
Parts = Callable[[str], tuple[Rows, Rows]]
"""The training and held-out rows of a site."""
Codes = Mapping[str, Sequence[float]]
"""Numeric column → the numbers that stand for missing."""


def site_differences(data: DataSet, parts: Parts | None = None) -> tuple[str, ...]:
    """Warnings about what only shows when samples and columns are compared.

    ``data``: the sites; one alone is compared with itself; ``parts``: says which rows of a site train and which are
    held out; None: not known.
    """
    numbers, prints = _numbers(data), _prints(data)
    codes = {column: codes_of(sites) for column, sites in numbers.items()}
    return (
        *_fewer_pairs(_shared_samples(data, prints)),
        *_repeated_samples(data, prints, parts),
        *_shared_ids(data),
        *(_scales(numbers, codes) if data.preprocessing.standardise is None else ()),
        *fewer(missing_warnings(data.columns)),
        *fewer(named_warnings(data.columns)),
        *fewer(number_warnings(numbers, codes)),
    )


def shared_groups(data: DataSet) -> dict[tuple[str, str], int]:
    """The pairs of sites of a user's own data that have numbers of groups in common, and how many.

    Published data sets number base images alike at all sites on purpose, and are left out.
    """
    if data.manifest.source != "yours":
        return {}
    numbers = {
        name: set(np.unique(domain.groups).tolist())
        for name, domain in data.domains.items()
        if domain.groups is not None
    }
    return {(item, other): len(numbers[item] & numbers[other]) for item, other in _pairs_with_equal(numbers)}


def _fewer_pairs(warnings: Iterable[str]) -> Iterator[str]:
    """The first ones, and how many more: many sites have very many pairs."""
    result = [*warnings]
    yield from result[:_MOST_PAIRS]
    if len(result) > _MOST_PAIRS:
        yield f"{len(result) - _MOST_PAIRS} more pairs of sites hold or share equal samples"


def _shared_samples(data: DataSet, prints: Prints) -> Iterator[str]:
    """The pairs of sites that share samples: one image is enough; of rows, which can be alike by chance, half."""
    domains = {name: domain for name, domain in data.domains.items() if not isinstance(domain.inputs, SparseRows)}
    small = bool(prints)
    rows = {name: set(kinds.tolist()) for name, kinds in prints.items()}
    for item, other in _pairs_with_equal(
        _twice(prints) if small else {name: [_start(it)] for name, it in domains.items()}
    ):
        first, second = domains[item], domains[other]
        if first.groups is not None and second.groups is not None:
            continue  # these say which samples of different sites belong together
        if len(first) == len(second) and np.array_equal(np.asarray(first.inputs), np.asarray(second.inputs)):
            yield f"sites '{item}' and '{other}' hold the same samples: is it the same file twice?"
        elif small:
            both = len(rows[item] & rows[other])
            fewest = min(len(rows[item]), len(rows[other]))
            if data.preprocessing.kind != "image" and 2 * both >= fewest:
                both = len({*_fingerprints(first, _rare(first, len(second)))} & rows[other])
            if 2 * both >= fewest or (both and data.preprocessing.kind == "image"):
                yield (
                    f"sites '{item}' and '{other}' share {both} equal samples: what trains at one is measured at the "
                    "other"
                )


def _twice(prints: Prints) -> dict[str, set[int]]:
    """What of each site occurs more than once at all sites together: of many samples, few do."""
    numbers, counts = np.unique(np.concatenate([*prints.values()]), return_counts=True)
    twice = {*numbers[counts > 1].tolist()}
    return {name: twice.intersection(item.tolist()) for name, item in prints.items()}


def _start(domain: Domain) -> int:
    """A number that is equal for equal sites: of how many samples there are, and of the first."""
    return hash((len(domain), np.asarray(domain.inputs)[:1].tobytes()))


def _pairs_with_equal(of_sites: Mapping[str, Collection[Hashable]]) -> list[tuple[str, str]]:
    """The pairs of sites with an entry in common, in the order of the sites: of many pairs, few have."""
    holders: dict[Hashable, list[int]] = {}
    for number, entries in enumerate(of_sites.values()):
        for entry in entries:
            holders.setdefault(entry, []).append(number)
    names = list(of_sites)
    pairs = {pair for sites in holders.values() if len(sites) > 1 for pair in combinations(sites[:_HOLDERS], 2)}
    return [(names[entry], names[other]) for entry, other in sorted(pairs)]


def _prints(data: DataSet) -> dict[str, NDArray[np.int64]]:
    """A number for each sample of each site, equal for equal ones; of none where samples take too many bytes."""
    domains = {name: domain for name, domain in data.domains.items() if not isinstance(domain.inputs, SparseRows)}
    if sum(np.asarray(domain.inputs).nbytes for domain in domains.values()) > _MOST_BYTES:
        return {}
    return {name: np.array(_fingerprints(domain), dtype=np.int64) for name, domain in domains.items()}


def _fingerprints(domain: Domain, chosen: Rows | slice = slice(None)) -> list[int]:
    inputs = np.ascontiguousarray(np.asarray(domain.inputs)[chosen])
    return [hash(row.tobytes()) for row in inputs]


def _repeated_samples(data: DataSet, all_prints: Prints, parts: Parts | None) -> Iterator[str]:
    """Sites that hold samples more than once, and whether copies are on both sides of a split; of a user's own data."""
    if data.manifest.source != "yours":
        return
    images, result = data.preprocessing.kind == "image", []
    for name, prints in all_prints.items():
        domain = data.domains[name]
        kinds, number = np.unique(prints, return_inverse=True)
        again = len(domain) - len(kinds)
        if again and not images:
            again = _copies(domain, number.reshape(-1))
        if again == 0 or (not images and (again < _REPEATS or again < _REPEATED * len(domain))):
            continue
        text = f"{again} of {len(domain)} samples of '{name}' repeat another one"
        if parts is not None:
            train, held_out = parts(name)
            both = int(np.isin(prints[held_out], prints[train]).sum())
            text += f", and {both} of its {len(held_out)} held-out samples also train" if both else ""
        result.append(text)
    if result:
        more = f"; and {len(result) - _MOST_NAMED} more sites" if len(result) > _MOST_NAMED else ""
        yield f"samples repeat within sites: {'; '.join(result[:_MOST_NAMED])}{more}; leave out the copies"


def _copies(domain: Domain, number: NDArray[np.int64]) -> int:
    """How many rows repeat an earlier one and a label, of those that chance would hardly repeat.

    ``number`` tells rows apart.
    """
    labels = domain.labels.reshape(len(domain), -1)
    again = np.bincount(number)[number] > 1
    whole = Counter((int(number[row]), labels[row].tobytes()) for row in _rare(domain, len(domain) - 1) if again[row])
    return sum(count - 1 for count in whole.values())


def _rare(domain: Domain, others: int) -> Rows:
    """The rows that chance would hardly have again among so many others.

    Were columns independent, a row with its label would be expected ``others`` Π p(value) times.
    """
    inputs, labels = np.asarray(domain.inputs), domain.labels.reshape(len(domain), -1)
    expected = np.full(len(domain), np.log(max(1, others)))
    for column in (*inputs.reshape(len(domain), -1).T, *labels.T):
        _, index, counts = np.unique(column, return_inverse=True, return_counts=True)
        expected += np.log(counts[index.reshape(-1)] / len(domain))
    return np.flatnonzero(expected < np.log(_BY_CHANCE))


def _shared_ids(data: DataSet) -> Iterator[str]:
    """Sites with a name of a row twice, and pairs of sites that have names in common, unless these only count rows."""
    named = {
        name: Counter(domain.ids)
        for name, domain in data.domains.items()
        if domain.ids is not None and not _counts_rows(domain.ids)
    }
    twice = {name: sum(count for count in ids.values() if count > 1) for name, ids in named.items()}
    repeated = [f"{count} of {len(data.domains[name])} rows of '{name}'" for name, count in twice.items() if count]
    if repeated:
        yield (
            f"rows have the id of another row of their site: {join_names(repeated, _MOST_NAMED)}: if they are of one "
            "patient, some train while others are measured"
        )
    both = [
        f"{len(named[item].keys() & named[other].keys())} of '{item}' and '{other}'"
        for item, other in _pairs_with_equal(named)
    ]
    if both:
        yield (
            f"sites have ids in common: {join_names(both, _MOST_NAMED)}: if they are the same patients, what trains at "
            "one is measured at the other"
        )


def _counts_rows(ids: tuple[str, ...]) -> bool:
    """Whether ids are numbers from 0 or 1 on, as exports count their rows."""
    try:
        return {int(name) for name in ids} <= set(range(len(ids) + 1))
    except ValueError:
        return False


def _numbers(data: DataSet) -> Numbers:
    """The values of numeric columns, where they are measurements: of a table, or of few columns without names."""
    if data.columns:
        return numbers_of(_some(data.columns))
    dense = {site: domain.inputs for site, domain in data.domains.items() if not isinstance(domain.inputs, SparseRows)}
    plain = data.preprocessing.kind == "features" and data.preprocessing.backbone is None
    if not plain or len(data.input_shape) != 1 or data.input_shape[0] > _MEASURED or len(dense) < len(data.domains):
        return {}
    some = {site: inputs[:: max(1, len(inputs) // _LOOKED_AT)] for site, inputs in _some(dense).items()}
    return {
        f"column {number}": {
            site: Column(*np.unique(inputs[:, number].astype(np.float64), return_counts=True))
            for site, inputs in some.items()
        }
        for number in range(data.input_shape[0])
    }


def _some(sites: Mapping[str, T]) -> dict[str, T]:
    """All sites, or of very many some evenly among them."""
    step = -(-len(sites) // _COMPARED)
    return dict(islice(sites.items(), 0, None, max(1, step)))


def _scales(numbers: Numbers, codes: Codes) -> Iterator[str]:
    # Where most values are one, such as 0, the deviation says how many are not, and nothing of units.
    yield from scale_warnings(
        {
            column: {
                site: moments_of(values)
                for site, values in _without(codes[column], sites).items()
                if values.count >= _ENOUGH and values.rows.max() <= 0.5 * values.count
            }
            for column, sites in numbers.items()
        }
    )


def _without(codes: Sequence[float], sites: Mapping[str, Column]) -> dict[str, Column]:
    """A column without the numbers that stand for missing, which are reported by themselves."""
    return {site: values.without(codes) if codes else values for site, values in sites.items()}
