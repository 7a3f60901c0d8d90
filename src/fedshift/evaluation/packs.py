"""The format of packed results: `runs.parquet` has a row for each finished run, `rounds.parquet` one for each round.

A column is a path in a run's `result.json`, or below `round.` in a round: `selected.last.accuracy` is the field
`accuracy` in `last` in `selected`. Whole numbers, numbers, words and truth values have columns of that type, and so
have lists of them. Anything else is JSON, as the column's metadata says; so is a mapping of more than `MOST_NAMES`
names. The column `settings` has a run's `experiment.yaml` as JSON, `packed.rounds` the number of its rounds. Where
nothing stands, there is no such field.

Losses, weights, seconds of rounds, accuracies of classes and bins of scores keep five digits: numbers of 32 bits.
Everything else is exact, such as what tables average and compare.

Nothing here touches a file: `encode` makes the bytes of both, `decode` and `decode_rounds` read them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult
from fedshift.extras import import_extra
from fedshift.files import names_a_folder

RUNS, ROUNDS = "runs.parquet", "rounds.parquet"
FORMAT = 3
"""Formats 1 and 2 were text."""
MOST_NAMES = 100
"""A mapping of more names is one column of JSON and not one for each name: Parquet keeps 150 bytes of each column."""
KEY = ("method", "target", "seed")
"""The fields that name a run."""
_SETTINGS, _COUNT = "settings", "packed.rounds"
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
_EXPANDS, _SMALL = 300, 1 << 24
"""A file may have that many times its bytes in cells, and so many more; results have about one a byte."""
_JSON = {b"fedshift": b"json"}
_LEAST, _MOST = 1e-37, 1e38
"""Between them, a number of 32 bits has five digits."""


@dataclass(frozen=True)
class PackedRun:
    """The content of one finished run's folder."""

    result: Mapping[str, Any]  # the content of `result.json`
    identity: Mapping[str, Any]  # the settings in `experiment.yaml`
    # the lines of `rounds.jsonl`; None if there is no such file, or if they were not read
    rounds: bytes | None = field(default=None, repr=False)
    count: int | None = None  # how many rounds are packed; None if the run has no `rounds.jsonl`, or was not packed

    @property
    def name(self) -> str:
        """`<method>/<target>/seed-<n>`: the run's folder below its experiment's."""
        return "/".join(self.folder_names)

    @property
    def folder_names(self) -> tuple[str, str, str]:
        """The names of that folder and of those above it."""
        return str(self.result["method"]), str(self.result["target"]), f"seed-{self.result['seed']}"


def encode(runs: Iterable[PackedRun], order: Mapping[str, Any]) -> dict[str, bytes]:
    """The two files by name. The same runs give the same bytes, whatever their order.

    Args:
        order: the order of the plan: names of methods, targets and so on.

    Raises:
        ValueError: a line of the rounds is no mapping. The message has the line's number.

    Example:
        >>> run = PackedRun({"method": "fedavg", "target": "D0", "seed": 0, "seconds": 1.5}, {})
        >>> files = encode([run], {})
        >>> decode(files["runs.parquet"])[0]["fedavg/D0/seed-0"].result["seconds"]
        1.5
    """
    ordered = sorted(runs, key=lambda run: [run.result[name] for name in KEY])
    of_runs: list[dict[str, Any]] = []
    of_rounds: list[dict[str, Any]] = []
    for run in ordered:
        rows = rows_of(run.rounds)
        key = {name: run.result[name] for name in KEY}
        of_runs.append(dict(leaves(with_kept_digits(run.result))) | {_SETTINGS: run.identity})
        if rows is not None:
            of_runs[-1][_COUNT] = len(rows)
            of_rounds += [{**key, **dict(leaves(row, "round."))} for row in rows]
    about = {"format": FORMAT, "order": dict(order)}
    return {ROUNDS: _parquet(of_rounds, {"format": FORMAT}), RUNS: _parquet(of_runs, about)}


def decode(data: bytes, folder: str = "") -> tuple[dict[str, PackedRun], dict[str, Any]]:
    """Read `runs.parquet`.

    Returns:
        The runs by name, without rounds; the planned order.

    Raises:
        UserError: the file is malformed.

    Example:
        >>> files = encode([PackedRun({"method": "fedavg", "target": "D0", "seed": 0}, {})], {"seeds": [0]})
        >>> runs, order = decode(files["runs.parquet"])
        >>> list(runs), order
        (['fedavg/D0/seed-0'], {'seeds': [0]})
    """
    file = f"{folder}{RUNS}"
    table, about = _read(data, file)
    result: dict[str, PackedRun] = {}
    try:
        for number, row in enumerate(_rows(table), 1):
            run = _run(row)
            if run.name in result:
                raise ValueError(f"{run.name} stands in it twice, the second time in row {number}")
            result[run.name] = run
        return result, dict(about["order"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise malformed_error(file, str(error)) from None


@dataclass(frozen=True)
class PackedRounds:
    """What `rounds.parquet` holds, by run."""

    file: str  # the file, for messages
    table: Any = field(repr=False)  # its rows
    rows: Mapping[str, tuple[int, int]]  # name of a run → number of its first row, and how many it has

    def lines(self, run: PackedRun) -> bytes | None:
        """The content of a run's `rounds.jsonl`; None if it has none.

        UserError if the file has other rounds than `runs.parquet` says.
        """
        first, number = self.rows.get(run.name, (0, 0))
        if run.count is None:
            return None
        try:
            rows = [nest(row).get("round", {}) for row in _rows(self.table.slice(first, number))]
        except (ValueError, AttributeError) as error:
            raise malformed_error(self.file, str(error)) from None
        if len(rows) != run.count:
            raise malformed_error(self.file, f"it has {len(rows)} rounds of {run.name}, and {RUNS} says {run.count}")
        return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def decode_rounds(data: bytes, folder: str = "") -> PackedRounds:
    """Read `rounds.parquet`.

    Raises:
        UserError: the file is malformed.

    Example:
        >>> run = PackedRun({"method": "fedavg", "target": "D0", "seed": 0}, {}, b'{"round": 1}' + bytes([10]))
        >>> files = encode([run], {})
        >>> (read,) = decode(files["runs.parquet"])[0].values()
        >>> decode_rounds(files["rounds.parquet"]).lines(read).decode().strip()
        '{"round":1}'
    """
    file = f"{folder}{ROUNDS}"
    table, _ = _read(data, file)
    rows: dict[str, tuple[int, int]] = {}
    if table.num_rows:
        try:
            keys = zip(*(table.column(name).to_pylist() for name in KEY), strict=True)
        except KeyError as error:
            raise malformed_error(file, f"it has no column {error}") from None
        for number, (method, target, seed) in enumerate(keys):
            name = f"{method}/{target}/seed-{seed}"
            first, before = rows.get(name, (number, 0))
            if first + before != number:
                raise malformed_error(file, f"the rounds of {name} do not stand together")
            rows[name] = (first, before + 1)
    return PackedRounds(file, table, rows)


def with_kept_digits(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as packing keeps it: exact but for accuracies of classes and bins of scores, which have five digits.

    Example:
        >>> with_kept_digits({"seconds": 1.23456789, "selected": {"last": {"accuracy": 80.0, "per_class": [200 / 3]}}})
        {'seconds': 1.23456789, 'selected': {'last': {'accuracy': 80.0, 'per_class': [66.667]}}}
    """
    changed = {"sites": shorten(result["sites"])} if "sites" in result else {}
    selected = result.get("selected")
    if isinstance(selected, Mapping):
        changed["selected"] = {name: shorten(item, ("per_class",)) for name, item in selected.items()}
    return {**result, **changed}


def shorten(value: Any, names: Sequence[str] = _FIVE_DIGITS) -> Any:
    """A round, a site's metrics or a list of them, as packing keeps it: fields of these names have five digits.

    Example:
        >>> shorten({"target_accuracy": {"D0": 66.666666666}, "losses": {"D15": 0.66666666666}})
        {'target_accuracy': {'D0': 66.666666666}, 'losses': {'D15': 0.66667}}
    """
    if isinstance(value, list):
        return [shorten(item, names) for item in value]
    if isinstance(value, Mapping):
        return {name: round_floats(item) if name in names else item for name, item in value.items()}
    return value


def round_floats(value: Any) -> Any:
    """The same with every float in it to five significant digits. Whole numbers stay.

    Example:
        >>> round_floats({"loss": 0.66666666666, "bins": [12345678, 33.333333333]})
        {'loss': 0.66667, 'bins': [12345678, 33.333]}
    """
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [round_floats(item) for item in value]
    if isinstance(value, Mapping):
        return {name: round_floats(item) for name, item in value.items()}
    return value


def rows_of(lines: bytes | None) -> list[dict[str, Any]] | None:
    """The rounds in a `rounds.jsonl`, after `shorten`. An unfinished last line is left out. None stays None.

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
            rows.append(shorten(row))
    return rows


def malformed_error(file: str, why: str) -> UserError:
    """The error for a packed file that cannot be read.

    Example:
        >>> print(malformed_error("rounds.parquet", "it has no column seed"))
        rounds.parquet is malformed (it has no column seed): restore the file
    """
    return UserError(f"{file} is malformed ({why}): restore the file")


def leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The (path, value) of everything in ``value`` that is no mapping, is empty, or has more than `MOST_NAMES` names.

    Args:
        value: a mapping of mappings. A dot in a name becomes %2E.
        above: a path to put before each, with its dot.

    Example:
        >>> dict(leaves({"selected": {"last": {"accuracy": 75.0}}, "rounds": 3}))
        {'selected.last.accuracy': 75.0, 'rounds': 3}
    """
    for name, below in value.items():
        path = f"{above}{name.replace('%', '%25').replace('.', '%2E')}"
        if isinstance(below, Mapping) and 0 < len(below) <= MOST_NAMES:
            yield from leaves(below, f"{path}.")
        else:
            yield path, below


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves`.

    Raises:
        ValueError: one path is both a value and a mapping.

    Example:
        >>> nest({"selected.last.accuracy": 75.0, "rounds": 3})
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


# Tables of Arrow's ----------------------------------------------------------------------------------------------------


def _parquet(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """Rows of paths and values as the content of a Parquet file."""
    arrow, parquet = (
        import_extra(name, extra="report", what="packing results") for name in ("pyarrow", "pyarrow.parquet")
    )
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        for path, value in row.items():
            columns.setdefault(path, [_ABSENT] * len(rows))[number] = value
    fields, arrays = [], []
    for path, values in columns.items():
        kind = _kind([value for value in values if value is not _ABSENT], exact=not _has_five_digits(path))
        if kind is None:
            cells = [None if value is _ABSENT else json.dumps(value) for value in values]
        else:
            cells = [None if value is _ABSENT else value for value in values]
        arrays.append(arrow.array(cells, kind or arrow.string()))
        fields.append(arrow.field(path, arrays[-1].type, metadata=_JSON if kind is None else None))
    schema = arrow.schema(fields, metadata={"fedshift": json.dumps(about)})
    file = io.BytesIO()
    table = arrow.Table.from_arrays(arrays, schema=schema)
    parquet.write_table(table, file, compression="zstd", compression_level=19, write_statistics=False)
    return file.getvalue()


_ABSENT = object()


def _has_five_digits(path: str) -> bool:
    top, _, rest = path.partition(".")
    return top == "round" and rest.split(".")[0] in _FIVE_DIGITS


def _kind(values: Sequence[Any], *, exact: bool) -> Any:
    """The type of a column of these values; None: they have none in common, and are written as JSON."""
    arrow = import_extra("pyarrow", extra="report", what="packing results")
    plain = {
        str: arrow.string(),
        bool: arrow.bool_(),
        int: arrow.int64(),
        float: arrow.float64() if exact else arrow.float32(),
    }
    kinds = {type(value) for value in values}
    lists = kinds == {list}
    inside = [item for value in values for item in value] if lists else list(values)
    kinds = {type(item) for item in inside} if lists else kinds
    if len(kinds) != 1 or (kind := plain.get(next(iter(kinds)))) is None:
        return None
    if kinds == {int} and not all(-(2**63) <= item < 2**63 for item in inside):
        return None
    if kinds == {float} and not exact and not all(item == 0 or _LEAST < abs(item) < _MOST for item in inside):
        kind = arrow.float64()
    return arrow.list_(kind) if lists else kind


def _read(data: bytes, file: str) -> tuple[Any, dict[str, Any]]:
    """The table in a Parquet file of ours, and what is noted of it."""
    arrow, parquet = (
        import_extra(name, extra="report", what=f"reading {file}") for name in ("pyarrow", "pyarrow.parquet")
    )
    try:
        opened = parquet.ParquetFile(arrow.BufferReader(data))
        size = opened.metadata
        if size.num_rows * size.num_columns > _EXPANDS * len(data) + _SMALL:
            raise ValueError("it expands to far more than results do")
        about = json.loads((opened.schema_arrow.metadata or {})[b"fedshift"])
        if about["format"] != FORMAT:
            raise ValueError(f"it is of format {about['format']}, and this version reads {FORMAT}")
        texts = [item.name for item in opened.schema_arrow if arrow.types.is_string(item.type)]
        table = parquet.ParquetFile(arrow.BufferReader(data), read_dictionary=texts).read()
        if len(set(table.column_names)) < table.num_columns:
            raise ValueError("two columns have one name")
        return table, about
    except (arrow.ArrowException, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise malformed_error(file, str(error).partition("\n")[0]) from None


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    """Each row as paths and values."""
    columns = [_values(table.schema.field(name), table.column(name)) for name in table.column_names]
    for cells in zip(*columns, strict=True):
        yield {name: cell for name, cell in zip(table.column_names, cells, strict=True) if cell is not _ABSENT}


def _values(column: Any, cells: Any) -> list[Any]:
    arrow = import_extra("pyarrow", extra="report", what="reading results")
    of_json = (column.metadata or {}).get(b"fedshift") == _JSON[b"fedshift"]
    inner = column.type.value_type if arrow.types.is_list(column.type) else column.type
    short = arrow.types.is_float32(inner)
    return [
        _ABSENT if item is None else json.loads(item) if of_json else round_floats(item) if short else item
        for item in cells.to_pylist()
    ]


def _run(row: Mapping[str, Any]) -> PackedRun:
    """A run from its row."""
    values = dict(row)
    identity, count = values.pop(_SETTINGS), values.pop(_COUNT, None)
    if not all(isinstance(values.get(name), str) and names_a_folder(values[name]) for name in ("method", "target")):
        raise ValueError("method and target must be names of folders")
    if type(values.get("seed")) is not int:
        raise ValueError("seed must be a whole number of at most 64 bits")
    if not isinstance(identity, dict) or not (count is None or type(count) is int):
        raise ValueError("settings must be a mapping, and the number of rounds a whole number")
    result = nest(values)
    known = [name for name in RunResult.model_fields if name in result]
    ordered = {name: result[name] for name in [*known, *(name for name in result if name not in known)]}
    return replace(PackedRun(ordered, identity), count=count)
