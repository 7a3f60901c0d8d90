"""Checks that every data set must pass, and warnings about what looks wrong."""

from __future__ import annotations

import difflib
import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fedshift.data.codings import quote
from fedshift.data.domain import NO_TOKEN, DataSet, Domain, SparseRows
from fedshift.data.splits import TEST, TRAIN
from fedshift.errors import UserError
from fedshift.text import join_names

TINY_SITE = 10
_ROWS_AT_ONCE = 4096
_MOST_BROKEN, _MOST_WHOLE = 10, 30
"""Classes whose names may be numbers with decimals, and whole numbers that differ between sites."""
_MOST_LINES = 20
"""Sites that have a warning each."""


def check_dataset(dataset: DataSet) -> DataSet:
    """Check a data set. Every builder ends with this call.

    Returns:
        The same data set, with warnings added and the input shape written into its preprocessing.

    Raises:
        UserError: there is no domain, or two have one name in other letters. Or there are fewer than two classes (for
            segmentation: no structure). Or a domain
            is empty, has labels outside 0…C-1, inputs, labels or groups of different lengths, NaN or infinite features,
            or masks that do not match its images. Or shapes or types differ between sites. Names the site.
    """
    where = f"data set {dataset.name}"
    if not dataset.domains:
        raise UserError(f"{where} has no domain: give it at least one site")
    _check_names(where, dataset)
    if len(dataset.classes) < (2 if dataset.task == "classification" else 1):
        raise UserError(
            f"{where} has fewer than two classes ({', '.join(dataset.classes) or 'none'}): give it at least two"
        )
    _check_domains(where, dataset)
    preprocessing = dataset.preprocessing.model_copy(update={"shape": dataset.input_shape})
    return replace(dataset, preprocessing=preprocessing, warnings=(*dataset.warnings, *_warnings(dataset)))


def _check_domains(where: str, dataset: DataSet) -> None:
    domains = dataset.domains.values()
    if all(item.fixed_split and item.train_rows is not None and not len(item.train_rows) for item in domains):
        raise UserError(f"{where}: data.split has no row of {TRAIN} at any site: give some sites rows of {TRAIN}")
    first = next(iter(domains))
    for name, domain in dataset.domains.items():
        _check_domain(f"{where}, site '{name}'", domain, len(dataset.classes))
        _check_labels(f"{where}, site '{name}'", domain, dataset)
        if (domain.masks is None) != (first.masks is None):
            with_masks, without = (domain, first) if first.masks is None else (first, domain)
            raise UserError(
                f"{where}: site '{with_masks.name}' has masks, site '{without.name}' has none: give masks to "
                "all or to none"
            )
        if domain.inputs.shape[1:] != first.inputs.shape[1:]:
            images = len(_shape(domain)) == len(_shape(first)) == 3
            advice = "; bring all images to one size, and to grey or to colour" if images else ""
            raise UserError(
                f"{where}: samples differ in shape between sites: '{first.name}' has {_shape(first)}, '{name}' has "
                f"{_shape(domain)}{advice}"
            )
        if type(domain.inputs) is SparseRows and type(first.inputs) is SparseRows:
            continue
        if _dtype(domain) != _dtype(first):
            raise UserError(
                f"{where}: samples differ in type between sites: '{first.name}' has {_dtype(first)}, '{name}' has "
                f"{_dtype(domain)}"
            )


def _check_names(where: str, dataset: DataSet) -> None:
    """Raise UserError for two sites of one name in other letters, or a name that cannot be written as UTF-8.

    A folder that another system named may have such a name. Results could not be written then, after training.
    """
    if (alike := names_alike(dataset.domains)) is not None:
        raise UserError(
            f"{where}: sites {quote(alike[0])} and {quote(alike[1])} have one name, but for capitals, spaces or "
            "Unicode forms: write it in one way if they are one site, or rename one"
        )
    for what, names in (("site", dataset.domains), ("class", dataset.classes)):
        for name in names:
            if not _is_unicode(name):
                raise UserError(f"{where}: the name of {what} {name!a} is not written in UTF-8: rename it")
    if not _is_unicode(json.dumps(dataset.preprocessing.table, ensure_ascii=False, default=str)):
        raise UserError(f"{where}: the name of a column or a category is not written in UTF-8: rename it")


def names_alike(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that a person reads as one; None if there are none.

    They differ in capitals, spaces and Unicode form only. Many file systems take their folders for the same one.

    Example:
        >>> names_alike(["a", "b", "A"]), names_alike(["a", "b"])
        (('a', 'A'), None)
    """
    known: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        first = known.setdefault("".join(plain.split()), name)
        if first is not name:
            return first, name
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shape(domain: Domain) -> tuple[int, ...]:
    return tuple(domain.inputs.shape[1:])


def _dtype(domain: Domain) -> str:
    return "sparse rows" if isinstance(domain.inputs, SparseRows) else str(domain.inputs.dtype)


def _check_domain(where: str, domain: Domain, classes: int) -> None:
    _check_lengths(where, domain)
    _check_masks(where, domain, classes)
    _check_split(where, domain)
    _check_inputs(where, domain)


def _check_lengths(where: str, domain: Domain) -> None:
    samples = len(domain.inputs)
    if samples == 0:
        raise UserError(f"{where} is empty: give it samples or leave it out")
    if len(domain.labels) != samples:
        raise UserError(f"{where}: {samples} samples but {len(domain.labels)} labels")
    if domain.groups is not None and len(domain.groups) != samples:
        raise UserError(f"{where}: {samples} samples but {len(domain.groups)} groups")
    if domain.ids is not None and len(domain.ids) != samples:
        raise UserError(f"{where}: {samples} samples but {len(domain.ids)} ids")


def _check_masks(where: str, domain: Domain, classes: int) -> None:
    if domain.masks is None:
        return
    expected = (len(domain.inputs), classes, *domain.inputs.shape[2:])
    if domain.masks.shape != expected or domain.masks.dtype != np.uint8 or domain.masks.max() > 1:
        raise UserError(
            f"{where}: masks are {domain.masks.dtype} {domain.masks.shape}, expected uint8 {expected} of 0 and 1"
        )


def _check_split(where: str, domain: Domain) -> None:
    samples = len(domain.inputs)
    for title, rows in (("training", domain.train_rows), ("test", domain.test_rows)):
        if rows is not None and len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= samples):
            raise UserError(f"{where}: the {title} rows go beyond its {samples} samples")
    if domain.fixed_split:
        _check_fixed_split(where, domain)


def _check_fixed_split(where: str, domain: Domain) -> None:
    """Raise UserError unless a fixed split has test rows, and no group on both sides."""
    train, test = domain.train_rows, domain.test_rows
    if train is None or test is None:
        raise UserError(f"{where}: a fixed split needs both its training and its test rows")
    if len(test) == 0:
        raise UserError(
            f"{where}: data.split has no row of {TEST}: each site needs some; one of {TEST} alone only tests"
        )
    if domain.groups is not None:
        both = np.intersect1d(domain.groups[train], domain.groups[test])
        if len(both):
            raise UserError(
                f"{where}: {len(both)} groups, such as patients, have rows of {TRAIN} and of {TEST} in data.split: put "
                "all rows of a group on one side"
            )


def _check_inputs(where: str, domain: Domain) -> None:
    if isinstance(domain.inputs, SparseRows):
        if not np.isfinite(domain.inputs.data).all():
            raise UserError(f"{where}: features hold NaN or infinite values")
    elif domain.inputs.dtype == np.float32:
        check_finite(where, domain.inputs)
    elif domain.inputs.dtype == np.int64:
        if int(domain.inputs.min()) < NO_TOKEN:
            raise UserError(f"{where}: tokens hold {domain.inputs.min()}: they must be 0 or more, or -1 for none")
    elif domain.inputs.dtype != np.uint8:
        raise UserError(
            f"{where}: inputs are {domain.inputs.dtype}, expected uint8 images, float32 features or int64 tokens"
        )


def _check_labels(where: str, domain: Domain, dataset: DataSet) -> None:
    classes = len(dataset.classes)
    expected = "int64" if dataset.preprocessing.objective is None else "float32"
    if domain.labels.dtype != expected:
        raise UserError(f"{where}: labels are {domain.labels.dtype}, expected {expected}")
    if expected == "float32":
        first = next(iter(dataset.domains.values()))
        if domain.labels.shape[1:] != first.labels.shape[1:]:
            raise UserError(
                f"{where}: it has {domain.labels.shape[1:]} labels of a sample, '{first.name}' {first.labels.shape[1:]}"
            )
        if not np.isfinite(domain.labels).all():
            raise UserError(f"{where}: labels hold NaN or infinite values: fill or drop such rows")
        return
    known = domain.labels[domain.known] if domain.unlabelled else domain.labels
    lowest, highest = int(known.min(initial=0)), int(known.max(initial=0))
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{where}: label {wrong} is out of range: labels must be 0 to {classes - 1}")


def check_finite(where: str, features: npt.NDArray[np.generic]) -> None:
    """Check that float features (n, d) are finite.

    UserError if some value is NaN or infinite; names the first row and column.
    """
    for begin in range(0, len(features), _ROWS_AT_ONCE):
        bad = ~np.isfinite(features[begin : begin + _ROWS_AT_ONCE])
        if bad.any():
            row, column = (int(number[0]) for number in np.nonzero(bad)[:2])
            raise UserError(
                f"{where}: features hold NaN or infinite values (first: row {begin + row}, column {column}): fill or "
                "drop such rows"
            )


def _warnings(dataset: DataSet) -> list[str]:
    result = []
    known: dict[str, str] = {}
    for name in dataset.classes:
        like = known.setdefault("".join(name.split()).casefold(), name)
        if like != name:
            result.append(
                f"classes '{like}' and '{name}' differ only in spaces or capitals: use one spelling for one class"
            )
    return [*result, *_absent(dataset), *_tiny(dataset)]


def _absent(dataset: DataSet) -> Iterator[str]:
    """Sites without a class: a line for each of a few sites, for each class where there are many."""
    labelled = {name: domain for name, domain in dataset.domains.items() if not domain.unlabelled}
    lacking = {name: absent_classes(dataset, domain) for name, domain in labelled.items()}
    lacking = {name: absent for name, absent in lacking.items() if absent}
    what = "structure" if any(domain.masks is not None for domain in dataset.domains.values()) else "class"
    if len(lacking) <= _MOST_LINES:
        for name, absent in lacking.items():
            yield f"site '{name}' has no sample of {what} {', '.join(absent)}: reported per {what}, not an error"
        return
    for label in dataset.classes:
        if sites := [name for name, absent in lacking.items() if label in absent]:
            where = f"{len(sites)} of {len(dataset.domains)} sites have no sample of {what} {label}"
            yield f"{where} ({_names_of(sites)}): reported per {what}, not an error"


def _names_of(sites: Iterable[str]) -> str:
    return join_names([f"'{site}'" for site in sites], _MOST_LINES)


def _tiny(dataset: DataSet) -> Iterator[str]:
    """Sites with few samples: a line for each of a few, or one for all."""
    tiny = {name: len(domain) for name, domain in dataset.domains.items() if len(domain) < TINY_SITE}
    if len(tiny) <= _MOST_LINES:
        yield from (
            f"site '{name}' has only {count} samples: its numbers will be rough" for name, count in tiny.items()
        )
        return
    where = f"{len(tiny)} of {len(dataset.domains)} sites have fewer than {TINY_SITE} samples"
    yield f"{where} ({_names_of(tiny)}): their numbers will be rough"


def absent_classes(dataset: DataSet, domain: Domain) -> tuple[str, ...]:
    """The classes, or structures for segmentation, of which a domain has no sample; none for other labels."""
    if dataset.preprocessing.objective is not None:
        return ()
    if domain.masks is None:
        counts = np.bincount(domain.labels[domain.known], minlength=len(dataset.classes))
    else:
        counts = np.count_nonzero(domain.masks, axis=(0, *range(2, domain.masks.ndim)))
    return tuple(dataset.classes[number] for number in np.flatnonzero(counts == 0))


def agreed_classes(classes: Mapping[str, Collection[str]], *, what: str, allow_missing: bool) -> tuple[str, ...]:
    """The classes of all sites together.

    A site may lack classes that another one has. When two sites each have a class that the other lacks, such as
    {cat, dog} and {cat, dogs}, one of them is probably misspelt.

    Args:
        classes: site → names of the classes it has.
        allow_missing: accept two sites that each have a class that the other lacks.

    Returns:
        Names in natural order (2 before 10).

    Raises:
        UserError: two sites each have a class that the other lacks; lists the classes of both. Or the names are numbers
            that look like a quantity.
    """
    _check_no_quantity(classes, what, allow_missing)
    if not allow_missing:
        unlike: dict[frozenset[str], str] = {}  # of thousands of sites, few differ in their classes
        for site, names in classes.items():
            unlike.setdefault(frozenset(names), site)
        for (first, item), (second, other) in combinations(unlike.items(), 2):
            if not first <= second and not second <= first:
                raise UserError(
                    f"{what} differ between sites: '{item}' has {_listing(first)}; '{other}' has {_listing(second)}. "
                    f"{_spelt_otherwise(item, first - second, second - first)}"
                    "Make the names equal (of tables: data.labels), or set data.missing_classes=allow if each truly "
                    "lacks a class of the other"
                )
    return natural_order({name for names in classes.values() for name in names})


def _spelt_otherwise(site: str, names: Collection[str], others: Collection[str]) -> str:
    """A question about the first of a site's ``names`` that looks like one of ``others``; empty if none does."""
    for name in natural_order(set(names)):
        if alike := difflib.get_close_matches(name, others, n=1):
            return f"Is '{name}' at '{site}' meant to be '{alike[0]}'? "
    return ""


def _check_no_quantity(classes: Mapping[str, Collection[str]], what: str, allow_missing: bool) -> None:
    """Raise UserError where the label looks like a quantity: many numbers with decimals, or many whole ones."""
    names = {name for names in classes.values() for name in names}
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return
    broken = [name for name, number in numbers.items() if not number.is_integer()]
    differ = not allow_missing and len({frozenset(names) for names in classes.values()}) > 1
    if (broken and len(names) > _MOST_BROKEN) or (differ and len(names) > _MOST_WHOLE):
        example = min(broken or names, key=len)
        raise UserError(
            f"{what} are {len(names)} different numbers, such as {example}: are they a quantity? For regression write "
            "data.task: regression; or make classes of them, such as low and high"
        )


def _listing(names: Collection[str]) -> str:
    return "[" + ", ".join(natural_order(names)) + "]"


def natural_order(names: Collection[str]) -> tuple[str, ...]:
    """Sort names: first whole numbers by value (9 before 10), then words."""

    def key(name: str) -> tuple[int, int, str]:
        digits = name.removeprefix("-")
        return (0, int(name), name) if digits.isascii() and digits.isdigit() else (1, 0, name)

    return tuple(sorted(names, key=key))
