"""The format of `rounds.jsonl.xz`: for each run a line that names it, then a line for each column.

    {"method":"fedavg","target":"D0","seed":0,"rounds":3,"columns":2,"result":{"sites":[…]}}
    ["round",[1,2,3]]
    ["target_accuracy.D0",[70.1],[2]]

A column is a path in the run's rounds and the values there. If only some rounds have the path, the numbers of these
rounds follow, from 0. Equal and similar values are side by side, which compresses better than a line for each round.
`result` has what the run's result says of single sites and classes, by path. An older file is read as well: there, the
line that names a run says `lines`, and the lines of its `rounds.jsonl` follow as they are.

Below that are the functions that turn nested records into paths and cells, for these columns and those of `runs.csv`.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedshift.errors import UserError

ROUNDS = "rounds.jsonl.xz"
_EXPANDS, _SMALL = 300, 1 << 24
"""A file may expand to that many times its size, and so many bytes more; results expand to about ten times."""
_MEMORY = 1 << 28
"""Bytes that the dictionary of a file may take."""
_FIVE_DIGITS = (
    "losses",
    "aggregation_weights",
    "seconds",
    "per_class",
    "target_hausdorff",
    "extra",
    "reliability",
    "target_hd95",
)
"""Fields of rounds, and of a site's metrics, whose floats keep five digits."""
KEY = ("method", "target", "seed")
"""The fields that name a run."""


@dataclass(frozen=True)
class Rounds:
    """What `rounds.jsonl.xz` holds of one run.

    Attributes:
        file: the file, for messages.
        line: the line of the file that names the run, from 1.
        lines: the lines that follow and belong to the run.
        count: how many rounds they hold; None if the run has no `rounds.jsonl`.
        by_column: whether they are columns. Else they are the lines of `rounds.jsonl`.
        result: fields of the run's result, by path.
    """

    file: str
    line: int
    lines: list[bytes] = field(repr=False)
    count: int | None
    by_column: bool
    result: Mapping[str, Any] = field(repr=False)

    @property
    def data(self) -> bytes | None:
        """The content of the run's `rounds.jsonl`; None if it has none.

        Raises:
            UserError: a column is malformed. The message names the file and the line.
        """
        if not self.by_column or self.count is None:
            return None if self.count is None else b"".join(self.lines)
        rows: list[dict[str, Any]] = [{} for _ in range(self.count)]
        for number, line in enumerate(self.lines, self.line + 1):
            try:
                path, values, *some = json.loads(line)
                for place, value in zip(*some or [range(self.count)], values, strict=True):
                    rows[place if place >= 0 else self.count][path] = value
            except (ValueError, TypeError, IndexError):
                raise malformed(self.file, number, "it should be a column of the run's rounds") from None
        try:
            return b"".join(_dumped(nested(row)) for row in rows)
        except (ValueError, AttributeError):
            raise malformed(self.file, self.line, "the columns of this run do not fit together") from None


def malformed(file: str, line: int, why: str) -> UserError:
    """The error for a line that cannot be read.

    Example:
        >>> print(malformed("rounds.jsonl.xz", 3, "it should name a run"))
        rounds.jsonl.xz line 3 is malformed (it should name a run): restore the file
    """
    return UserError(f"{file} line {line} is malformed ({why}): restore the file")


def encode_rounds(run: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] | None, result: Mapping[str, Any]) -> bytes:
    """The lines of a run, not compressed.

    Args:
        run: a mapping with the run's method, target and seed.
        rows: its rounds; None if it has no `rounds.jsonl`.
        result: fields of its result that are kept here, by path.

    Example:
        >>> lines = encode_rounds({"method": "fedavg", "target": "D0", "seed": 0}, [{"round": 1}, {"round": 2}], {})
        >>> print(lines.decode(), end="")
        {"method":"fedavg","target":"D0","seed":0,"rounds":2,"columns":1,"result":{}}
        ["round",[1,2]]
    """
    columns: dict[str, dict[int, Any]] = {}
    count = 0
    for count, row in enumerate(rows or (), 1):
        for path, value in leaves(row):
            columns.setdefault(path, {})[count - 1] = value
    head = {name: run[name] for name in KEY} | {"rounds": None if rows is None else count, "columns": len(columns)}
    lines = [_dumped(head | {"result": result})]
    for path, values in columns.items():
        lines.append(_dumped([path, [*values.values()], *([[*values]] if len(values) < count else [])]))
    return b"".join(lines)


def shortened(value: Any) -> Any:
    """A round, a site's metrics or a list of them, as packing keeps it: some of its fields have five digits.

    Example:
        >>> shortened({"target_accuracy": {"D0": 66.666666666}, "losses": {"D15": 0.66666666666}})
        {'target_accuracy': {'D0': 66.666666666}, 'losses': {'D15': 0.66667}}
    """
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if isinstance(value, Mapping):
        return {name: rounded(one) if name in _FIVE_DIGITS else one for name, one in value.items()}
    return value


def rows_of(lines: bytes | None) -> list[dict[str, Any]] | None:
    """The rounds in a `rounds.jsonl`, `shortened`. An unfinished last line is left out. None stays None.

    Raises:
        ValueError: a line is not a mapping. The message has the line's number.

    Example:
        >>> rows_of(b'{"seconds": 1.23456789}' + bytes([10]) + b'{"seco')
        [{'seconds': 1.2346}]
    """
    if lines is None:
        return None
    rows = []
    for number, line in enumerate(lines.split(b"\n")[:-1], 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}")
            rows.append(shortened(row))
    return rows


def decode_rounds(data: bytes, place: str = "") -> dict[str, Rounds]:
    """What the file holds of each run, by the run's name.

    Args:
        data: content of the file.
        place: its folder, for messages.

    Raises:
        UserError: the file is malformed. The message names the file and the line.

    Example:
        >>> lines = encode_rounds({"method": "fedavg", "target": "D0", "seed": 0}, [{"round": 1}], {})
        >>> decode_rounds(lzma.compress(lines, preset=0))["fedavg/D0/seed-0"].data.decode().strip()
        '{"round":1}'
    """
    file = f"{place}{ROUNDS}"
    try:
        reader = lzma.LZMADecompressor(memlimit=_MEMORY)
        text = reader.decompress(data, max_length=_EXPANDS * len(data) + _SMALL)
        if not reader.eof:
            raise lzma.LZMAError("truncated, or it expands to far more than results do")
        lines = text.splitlines(keepends=True)
    except lzma.LZMAError as error:
        raise UserError(f"{file} is damaged ({str(error).rstrip('.')}): restore the file") from None
    found: dict[str, Rounds] = {}
    start = 0
    while start < len(lines):
        try:
            head = json.loads(lines[start])
            name, by_column = name_of(head), "columns" in head
            length = head["columns" if by_column else "lines"]
            count, result = (head["rounds"], dict(head["result"])) if by_column else (length, {})
            if type(length) is not int or not 0 <= length < len(lines) - start:
                raise ValueError
            own = lines[start + 1 : start + 1 + length]
            if count is not None and (
                type(count) is not int or not 0 <= count <= sum(map(len, lines[start : start + 1] + own))
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise malformed(file, start + 1, "it should name a run and count its lines") from None
        found[name] = Rounds(file, start + 1, own, count, by_column, result)
        start += 1 + length
    return found


def name_of(run: Mapping[str, Any]) -> str:
    """`<method>/<target>/seed-<n>` of a result, or of any mapping with these three fields.

    Example:
        >>> name_of({"method": "fedavg", "target": "D0", "seed": 1})
        'fedavg/D0/seed-1'
    """
    return f"{run['method']}/{run['target']}/seed-{run['seed']}"


def _dumped(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


# Nested records as flat tables ----------------------------------------------------------------------------------------


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
    """The same with every float in it to five significant digits. Whole numbers stay.

    Example:
        >>> rounded({"loss": 0.66666666666, "bins": [12345678, 33.333333333]})
        {'loss': 0.66667, 'bins': [12345678, 33.333]}
    """
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return value
