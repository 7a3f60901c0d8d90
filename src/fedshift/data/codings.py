"""What looks wrong in the columns of tables: categories spelt otherwise, codes for missing values, constant columns.

It reads counts of cells as they are in the files, before missing cells are filled. Across machines only sums and sets
of categories are known, so less is seen.
"""

from __future__ import annotations

import contextlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedshift.data.identifiers import names_rows
from fedshift.data.table_files import Columns, canonical, is_missing
from fedshift.text import join_names

_FOREIGN = 0.1
"""The share of a site's rows from which a category that no other site has looks like another coding."""
_FEW, _ENOUGH = 3, 10
"""Rows of a category, and values of a column, from which they are compared."""
_REPEATED = 0.02
"""The share of a site's rows from which one value can be a code for "missing"."""
_FREQUENT, _MANY = 0.05, 20
"""A known code among so many values or more that has this share of the rows is one, also without a gap before it."""
_ALMOST_ALL = 0.95
"""The share of missing cells from which a column counts as missing at a site."""
_CHANCE = 1e-3
"""A column is constant by chance with this probability or more, or it is reported."""
_RARE = 0.05
"""A spelling with a smaller share of a site's rows than this, beside another one, is taken for a slip."""
_RATIO, _GAP = 5.0, 5.0
"""Standard deviations that differ by this factor, and means that differ by so many of them, are in other units."""
_SITE = 30
"""Values of a site from which its sums are compared in scale with those of others."""
_MOST_CATEGORIES = 10_000
"""A column of more categories at all sites together is not compared: it takes long, and is no column of categories."""
_ONE_SPELLING = "use one spelling, or map the others to it by data.spellings"
_MOST_NAMED = 3
_MOST_SITES = 10
"""Sites of one warning that are named with their numbers."""
_CODES = frozenset(
    {0.0} | {sign * float(digit * count) for digit in "789" for count in range(1, 6) for sign in (1, -1)} | {-1.0}
)
"""0, -1, and rows of 7, 8 or 9 such as 99 and -999: how "missing" is often written as a number."""


@dataclass(frozen=True)
class Column:
    """The values that a numeric column has at one site."""

    values: npt.NDArray[np.float64]  # the numbers, in order
    rows: npt.NDArray[np.int64]  # how many rows have each
    missing: int = 0  # how many rows have none

    @classmethod
    def of(cls, cells: Mapping[str, int]) -> Column:
        """The numbers among the cells of a column; other cells are errors where it is read."""
        by_value: Counter[float] = Counter()
        missing = 0
        for cell, count in cells.items():
            if is_missing(cell):
                missing += count
                continue
            with contextlib.suppress(ValueError):
                by_value[float(cell)] += count
        order = sorted(by_value)
        rows = np.array([by_value[item] for item in order], dtype=np.int64)
        return cls(np.array(order, dtype=np.float64), rows, missing)

    @cached_property
    def count(self) -> int:
        """The number of rows with a value."""
        return int(self.rows.sum())

    def share(self, value: float) -> float:
        """The share of the rows with a value that have this one."""
        return float(self.rows[self.values == value].sum()) / self.count if self.count else 0.0

    def frequent_values(self) -> list[float]:
        """The values that a considerable share of the rows has."""
        result: list[float] = self.values[self.rows / self.count >= _REPEATED].tolist() if self.count else []
        return result

    def without(self, values: Sequence[float]) -> Column:
        """The other values."""
        if not len(values):
            return self
        others = ~np.isin(self.values, values)
        return Column(self.values[others], self.rows[others], self.missing)


@dataclass(frozen=True)
class Categories:
    """The categories that a column has at one site."""

    names: Mapping[str, int]  # each category, and how many rows have it
    missing: int = 0  # how many rows have none

    @classmethod
    def of(cls, cells: Mapping[str, int]) -> Categories:
        """The categories of the cells of a column."""
        names: Counter[str] = Counter()
        for cell, count in cells.items():
            names["" if is_missing(cell) else canonical(cell)] += count
        missing = names.pop("", 0)
        return cls(dict(names), missing)

    @property
    def count(self) -> int:
        """The number of rows with a value."""
        return sum(self.names.values())


Counted = Mapping[str, Mapping[str, Column | Categories]]
"""Site → column of its table → the values that rows have in it, before missing ones are filled."""
Numbers = Mapping[str, Mapping[str, Column]]
"""Numeric column, in the words of messages → site → its values."""


def count_columns(table: Columns, numeric: Sequence[str], categorical: Sequence[str]) -> dict[str, Column | Categories]:
    """The values of the columns of a table, and how many rows have each."""
    return {
        **{name: Column.of(Counter(table.cells[name])) for name in numeric},
        **{name: Categories.of(Counter(table.cells[name])) for name in categorical},
    }


def missing_cells(columns: Counted) -> dict[str, dict[str, tuple[int, int]]]:
    """Column → site → its missing cells and its rows, for each column that misses a value anywhere."""
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for site, of_site in columns.items():
        for name, column in of_site.items():
            result.setdefault(name, {})[site] = column.missing, column.missing + column.count
    return {name: sites for name, sites in result.items() if any(missing for missing, _ in sites.values())}


def numbers_of(columns: Counted) -> Numbers:
    """The numeric columns."""
    numbers: dict[str, dict[str, Column]] = {}
    for site, of_site in columns.items():
        for name, column in of_site.items():
            if isinstance(column, Column):
                numbers.setdefault(in_quotes(name), {})[site] = column
    return numbers


def in_quotes(column: str) -> str:
    """A column with a name, in messages."""
    return f"column '{column}'"


def missing_warnings(columns: Counted) -> Iterator[str]:
    """The columns that have almost no value at some site; one line for each."""
    for column, sites in missing_cells(columns).items():
        empty = [
            f"'{site}' ({rows - missing} of {rows} rows)"
            for site, (missing, rows) in sites.items()
            if missing >= _ALMOST_ALL * rows
        ]
        if empty:
            yield f"column '{column}' has no value, or almost none, at {join_names(empty, _MOST_SITES)}"


def number_warnings(numbers: Numbers, codes: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Codes for "missing", columns that never change at a site, and signs in other digits; one line for a column.

    ``codes``: of `codes_of`, by column.
    """
    for name, sites in numbers.items():
        differences = list(_codes(name, sites, codes[name])) or list(_other_digits(name, sites))
        if not differences and any(len(item.values) == 1 for item in sites.values()):
            named = {
                site: {f"{value:g}": int(rows) for value, rows in zip(item.values, item.rows, strict=True)}
                for site, item in sites.items()
            }
            differences = list(_constant(name, named))
        yield from differences


def named_warnings(columns: Counted) -> Iterator[str]:
    """Categories that other sites spell otherwise or do not have, and columns with a single one at some site."""
    result: dict[str, dict[str, Mapping[str, int]]] = {}
    for site, of_site in columns.items():
        for name, column in of_site.items():
            if isinstance(column, Categories):
                result.setdefault(name, {})[site] = column.names
    for name, sites in result.items():
        if any(map(names_rows, (*sites.values(), _together(sites)))):
            continue  # a warning shows no number of a patient, whatever may leave the site
        shown = {site: {quote(what): count for what, count in item.items()} for site, item in sites.items()}
        yield from (
            list(category_warnings(name, sites)) or list(_slips(name, sites)) or list(_constant(in_quotes(name), shown))
        )


def _together(sites: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """The rows of each category at all sites."""
    rows: Counter[str] = Counter()
    for named in sites.values():
        rows.update(named)
    return rows


# Categories -----------------------------------------------------------------------------------------------------------


def spelling(category: str) -> str:
    """What categories have in common that differ in case, Unicode form, spaces, hyphens or leading zeros only.

    Example:
        >>> spelling("Ja ") == spelling("ja"), spelling("01") == spelling("1"), spelling("a") == spelling("b")
        (True, True, False)
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", category).casefold())
    text = "".join(letter for letter in text if not letter.isspace() and letter not in "-_.")
    return (text.lstrip("0") or "0") if text.isdigit() else text


def category_warnings(column: str, sites: Mapping[str, Mapping[str, int | None]]) -> Iterator[str]:
    """Warnings about categories of a column that other sites spell otherwise, or do not have.

    ``sites``: site → category → the number of rows that have it; None where that is not known.
    """
    sites = {site: named for site, named in sites.items() if named}
    if len(sites) < 2 or sum(map(len, sites.values())) > _MOST_CATEGORIES:
        return
    respelt = list(_respelt(sites))
    if respelt:
        yield f"column '{column}' spells a category in more than one way: {_list_some(respelt)}; {_ONE_SPELLING}"
        return
    foreign = {site: _foreign(site, sites) for site in sites}
    unlike = [text for site, names in foreign.items() if names and (text := _unlike(site, names, sites))]
    if not unlike:
        groups = _separate_groups(sites)
        unlike = [f"{_names(group)} {_has(group)} {_listing(known)}" for group, known in groups] if groups else []
    if unlike:
        yield f"column '{column}' is coded otherwise at some sites: {'; '.join(unlike[: _MOST_NAMED + 1])}"


def _respelt(sites: Mapping[str, Mapping[str, int | None]]) -> Iterator[str]:
    """The spellings of a category that not all sites use, each with its sites."""
    spellings: dict[str, dict[str, list[str]]] = {}
    for site, named in sites.items():
        for category in named:
            spellings.setdefault(spelling(category), {}).setdefault(category, []).append(site)
    for same in spellings.values():
        if len(same) > 1 and any(len(having) < len(sites) for having in same.values()):
            usual = max(same, key=lambda category: len(same[category]))
            for category, having in same.items():
                if category != usual:
                    where = ", ".join(f"'{site}'{_of_rows([category], sites[site])}" for site in having)
                    elsewhere = ", ".join(f"'{site}'" for site in same[usual][:_MOST_NAMED])
                    yield f"{quote(category)} at {where} is {quote(usual)} at {elsewhere}"


def _foreign(site: str, sites: Mapping[str, Mapping[str, int | None]]) -> list[str]:
    elsewhere = {category for other, named in sites.items() if other != site for category in named}
    return [category for category in sites[site] if category not in elsewhere]


def _unlike(site: str, names: Sequence[str], sites: Mapping[str, Mapping[str, int | None]]) -> str:
    """That a site has categories which no other site has; empty where they are few."""
    rows = [sites[site][name] for name in names]
    whole = [count for count in sites[site].values() if count is not None]
    if None in rows:
        if len(names) < len(sites[site]):
            return ""  # how many rows have them is not known
    else:
        of_them = sum(count for count in rows if count is not None)
        if of_them < _FEW or of_them <= _FOREIGN * sum(whole):
            return ""
    known = sorted({category for other, named in sites.items() if other != site for category in named})
    shares = _of_rows(names, sites[site])
    return f"no other site has {_listing(names)} of '{site}'{shares}, elsewhere it is {_listing(known)}"


def _of_rows(names: Sequence[str], named: Mapping[str, int | None]) -> str:
    whole = [count for count in named.values() if count is not None]
    if len(whole) < len(named):
        return ""
    return f" ({100 * sum(named[name] or 0 for name in names) / sum(whole):.3g} % of its rows)"


def _separate_groups(sites: Mapping[str, Mapping[str, int | None]]) -> list[tuple[list[str], list[str]]]:
    """Groups of sites, with their categories, such that two groups have none in common; empty where all are linked."""
    groups: list[tuple[list[str], set[str]]] = []
    for site, named in sites.items():
        linked = [group for group in groups if group[1] & set(named)]
        groups = [group for group in groups if group not in linked]
        members = [name for group in linked for name in group[0]]
        groups.append(([*members, site], set(named).union(*(group[1] for group in linked))))
    return [(members, sorted(known)) for members, known in groups] if len(groups) > 1 else []


def _slips(column: str, sites: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """A site that spells a category otherwise in a few of its rows, where it has both spellings."""
    result = []
    for site, named in sites.items():
        by_spelling: dict[str, list[str]] = {}
        for category in named:
            by_spelling.setdefault(spelling(category), []).append(category)
        for same in by_spelling.values():
            rare = min(same, key=lambda category: named[category])
            if len(same) > 1 and named[rare] < _RARE * sum(named.values()):
                usual = max(same, key=lambda category: named[category])
                result.append(f"{quote(rare)} ({named[rare]} rows) and {quote(usual)} at '{site}'")
    if result:
        yield f"column '{column}' spells a category in more than one way: {_list_some(result)}; {_ONE_SPELLING}"


def quote(category: str) -> str:
    """A category in a message: what differs in its Unicode form only is shown by its code points."""
    plain = category.isascii() or category == unicodedata.normalize("NFC", category)
    return f"'{category}'" if plain else f"{category!a}"


def _listing(names: Sequence[str]) -> str:
    return join_names([quote(name) for name in sorted(names)], _MOST_NAMED)


def _list_some(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
    return "; ".join(parts[:_MOST_NAMED]) + more


def _names(sites: Sequence[str]) -> str:
    return join_names([f"'{site}'" for site in sites], _MOST_NAMED)


def _has(sites: Sequence[str]) -> str:
    return "has" if len(sites) == 1 else "have"


# Numbers --------------------------------------------------------------------------------------------------------------


def codes_of(sites: Mapping[str, Column]) -> list[float]:
    """The numbers at the ends of a column's range that look like codes for "missing"."""
    ends = {float(value) for site in sites.values() if site.count for value in (site.values[0], site.values[-1])}
    repeated = {value for site in sites.values() for value in site.frequent_values()}
    suspects = sorted(ends & repeated)
    if not suspects:
        return []
    rest = pool_columns(list(sites.values())).without([value for value in suspects if value in _CODES])
    lowest, highest = (rest.values[0], rest.values[-1]) if len(rest.values) else (0.0, 0.0)
    outer = [value for value in suspects if not lowest < value < highest]  # of many sites few ends are ends of all
    return [value for value in outer if _is_code(value, rest.without([value]), sites)]


def _codes(column: str, sites: Mapping[str, Column], codes: Sequence[float]) -> Iterator[str]:
    if not codes:
        return
    mean, deviation = moments_of(pool_columns(list(sites.values())).without(codes))
    where = [
        f"{value:g} in {_share(item.share(value))} of the rows of '{site}'"
        for value in codes
        for site, item in sites.items()
        if item.share(value) > 0
    ]
    means = "it means" if len(codes) == 1 else "they mean"
    yield (
        f"{column} has {join_names(where, _MOST_SITES)}, the other values are {mean:.4g} ± {deviation:.3g}: if {means} "
        "missing, set data.missing_values, or leave such cells empty"
    )


def pool_columns(columns: Sequence[Column]) -> Column:
    """The values of several sites together."""
    values, position = np.unique(np.concatenate([column.values for column in columns]), return_inverse=True)
    weights = np.concatenate([column.rows for column in columns])
    return Column(values, np.bincount(position.reshape(-1), weights, len(values)).astype(np.int64))


def _is_code(value: float, rest: Column, sites: Mapping[str, Column]) -> bool:
    """Whether a number at an end of the range, which repeats, is a code and no value.

    It is one of the usual codes with a gap before it of a deviation or more and of three steps between values; or any
    number with a gap of five deviations; or the only negative one; or a usual code far more frequent than all others.
    """
    if len(rest.values) < _FEW or rest.values[0] < value < rest.values[-1]:
        return False
    if not any(site.share(value) >= _REPEATED and site.share(value) * site.count >= _FEW for site in sites.values()):
        return False
    _, deviation = moments_of(rest)
    gap = float(np.abs(rest.values - value).min())
    step = float(np.median(np.diff(rest.values)))
    if value not in _CODES:
        return gap > 5 * deviation and gap > 10 * step
    if gap > deviation and gap >= 3 * step:
        return True
    if value < 0 <= rest.values[0]:
        return True
    return value != 0 and len(rest.values) >= _MANY and any(_is_frequent(value, site) for site in sites.values())


def _is_frequent(value: float, column: Column) -> bool:
    others = column.without([value]).rows
    share = column.share(value)
    return share >= _FREQUENT and bool(len(others)) and share * column.count >= 3 * int(others.max())


def moments_of(column: Column) -> Moments:
    """Mean and standard deviation of a column; zeros if it is empty."""
    if not column.count:
        return 0.0, 0.0
    mean = float((column.values * column.rows).sum() / column.count)
    return mean, float(np.sqrt(((column.values - mean) ** 2 * column.rows).sum() / column.count))


def _other_digits(column: str, sites: Mapping[str, Column]) -> Iterator[str]:
    """A column of two values, such as 0 and 1, that is written with other two at some sites, such as 1 and 2."""
    pairs = {site: tuple(item.values.tolist()) for site, item in sites.items() if item.count >= _ENOUGH}
    known = {site: pair for site, pair in pairs.items() if len(pair) == 2}
    if len(set(known.values())) > 1 and all(len(pair) <= 2 for pair in pairs.values()):
        parts = [f"{low:g} and {high:g} at '{site}'" for site, (low, high) in known.items()]
        yield f"{column} is coded otherwise at some sites: {_list_some(parts)}"


def _share(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:.3g} %"


def _constant(column: str, sites: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """A column with one value in all rows of a site, where chance would not have it so."""
    result = []
    for site, named in sites.items():
        if len(named) != 1 or (rows := sum(named.values())) < _ENOUGH:
            continue
        (value,) = named
        others = [other for name, other in sites.items() if name != site]
        elsewhere = sum(sum(other.values()) for other in others)
        share = sum(other.get(value, 0) for other in others) / elsewhere if elsewhere else 1.0
        if share**rows < _CHANCE:
            result.append(f"{value} in all {rows} rows with a value at '{site}' and in {100 * share:.3g} % elsewhere")
    if result:
        yield f"{column} never changes at some sites: {_list_some(result)}"


def fewer(warnings: Iterable[str], most: int = 10) -> Iterator[str]:
    """The first warnings, and how many more there are."""
    result = list(warnings)
    yield from result[:most]
    if len(result) > most:
        yield f"{len(result) - most} more columns look wrong in one of these ways"


# Sums -----------------------------------------------------------------------------------------------------------------

Moments = tuple[float, float]
"""Mean and standard deviation."""


def scale_warnings(columns: Mapping[str, Mapping[str, Moments]]) -> Iterator[str]:
    """A warning about numeric columns whose scale differs between sites; ``columns``: column → site → its moments."""
    result = [text for column, sites in columns.items() if (text := _differs(column, sites))]
    if result:
        more = f"; and {len(result) - _MOST_NAMED} more columns" if len(result) > _MOST_NAMED else ""
        yield f"columns differ in scale between sites, as in other units: {'; '.join(result[:_MOST_NAMED])}{more}"


def _differs(column: str, sites: Mapping[str, Moments]) -> str:
    """The column and the two sites that differ most in it, if they do."""
    spread = {site: std for site, (mean, std) in sites.items() if std > 1e-6 * abs(mean)}
    if len(spread) < 2:
        return ""
    wide, narrow = max(spread, key=spread.__getitem__), min(spread, key=spread.__getitem__)
    high, low = max(spread, key=lambda site: sites[site][0]), min(spread, key=lambda site: sites[site][0])
    if sites[high][0] - sites[low][0] > _GAP * max(spread[high], spread[low]):
        pair = high, low
    elif spread[wide] > _RATIO * spread[narrow]:
        pair = wide, narrow
    else:
        return ""
    return f"{column} is " + " and ".join(f"{sites[site][0]:.4g} ± {sites[site][1]:.3g} at {site}" for site in pair)


def sums_warnings(columns: Mapping[str, Mapping[str, tuple[int, float, float]]]) -> Iterator[str]:
    """Warnings from the sums that sites of a deployment send: numeric column → site → count, sum, sum of squares.

    No value of a single row is known, and so not which value is frequent.
    """
    scaled = {}
    for column, sums in columns.items():
        known = {site: of_sums(*item) for site, item in sums.items() if item[0] >= _ENOUGH}
        constant = {site: mean for site, (mean, deviation) in known.items() if deviation == 0}
        zero_or_one = all(abs(total - squares) <= 1e-9 * (1 + abs(squares)) for _, total, squares in sums.values())
        if zero_or_one:
            continue  # a sign that few patients have may be 0 for all of a site, and says nothing of units
        if constant and len(constant) < len(known):
            parts = [
                f"{mean:g} in all {sums[site][0]} rows with a value at '{site}'" for site, mean in constant.items()
            ]
            yield f"{column} never changes at some sites: {_list_some(parts)}"
        scaled[column] = {site: item for site, item in known.items() if sums[site][0] >= _SITE}
    yield from scale_warnings({column: sites for column, sites in scaled.items() if _in_proportion(sites)})


def of_sums(count: int, total: float, squares: float) -> Moments:
    """Mean and standard deviation of so many values with this sum and sum of squares; 0 for what rounding left of 0."""
    mean = total / count
    variance = squares / count - mean**2
    return mean, 0.0 if variance <= 1e-12 * (1 + mean**2) else variance**0.5


def _in_proportion(sites: Mapping[str, Moments]) -> bool:
    """Whether means differ as much as deviations do, or far more. Other units change both by one factor.

    Where a column is mostly 0, deviations follow from how many rows are not, and means still more.
    """
    spread = {site: (mean, deviation) for site, (mean, deviation) in sites.items() if deviation > 0 and mean != 0}
    if len(spread) < 2:
        return False
    variations = [abs(deviation / mean) for mean, deviation in spread.values()]
    means = [mean for mean, _ in spread.values()]
    apart = max(means) - min(means) > _GAP * max(deviation for _, deviation in spread.values())
    return apart or max(variations) <= 2 * min(variations)
