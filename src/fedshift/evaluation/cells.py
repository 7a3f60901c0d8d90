"""Nested records as flat tables: dotted paths for columns, JSON or plain text for cells, six digits for floats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def leaves(value: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """The (path, value) of everything in ``value`` that is not a mapping with entries. A dot in a name becomes %2E.

    Args:
        value: a mapping of mappings.
        above: a path to put before each, with its dot.

    Raises:
        ValueError: ``value`` is not a mapping.

    Example:
        >>> dict(leaves({"selected": {"last": {"accuracy": 75.0}}, "rounds": 3}))
        {'selected.last.accuracy': 75.0, 'rounds': 3}
    """
    if not isinstance(value, Mapping):
        raise ValueError(above or "everything")
    for name, below in value.items():
        path = f"{above}{name.replace('%', '%25').replace('.', '%2E')}"
        if isinstance(below, Mapping) and below:
            yield from leaves(below, f"{path}.")
        else:
            yield path, below


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves`.

    Raises:
        ValueError: one path is both a value and a mapping.

    Example:
        >>> nested({"selected.last.accuracy": 75.0, "rounds": 3})
        {'selected': {'last': {'accuracy': 75.0}}, 'rounds': 3}
    """
    whole: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = (name.replace("%2E", ".").replace("%25", "%") for name in path.split("."))
        inner = whole
        for name in above:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{path} is below a value")
        if last in inner:
            raise ValueError(f"{path} is a value and a mapping")
        inner[last] = value
    return whole


def cell_of(value: Any) -> str:
    """A value as JSON. Text that cannot be mistaken for JSON stays as it is.

    Example:
        >>> cell_of("fedavg"), cell_of("1"), cell_of([1, None])
        ('fedavg', '"1"', '[1, null]')
    """
    plain = isinstance(value, str) and value == value.strip() and value.isprintable() and value_of(value) is value
    return value if plain and value else json.dumps(value, ensure_ascii=False)


def value_of(cell: str) -> Any:
    """The JSON in ``cell``; the same object ``cell`` if it is not JSON.

    Example:
        >>> value_of("fedavg"), value_of('"1"'), value_of("[1, null]")
        ('fedavg', '1', [1, None])
    """
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def rounded(value: Any) -> Any:
    """The same with every float in it to six significant digits. Whole numbers stay.

    Example:
        >>> rounded({"loss": 0.66666666666, "bins": [12345678, 33.333333333]})
        {'loss': 0.666667, 'bins': [12345678, 33.3333]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return value
