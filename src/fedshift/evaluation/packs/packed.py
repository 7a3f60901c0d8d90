"""The format of packed results: `experiment.yaml`, `runs.csv` and `rounds.jsonl.xz` hold an experiment's finished runs.

`runs.csv` has a line for each run and a column for each field of its result. `selected.last.accuracy` is the field
`accuracy` in `last` in `selected`. A cell holds JSON or plain text; an empty cell means that the run has no such field.
Values that are the same in every run, or in every run of a method, are in `experiment.yaml` instead. `rounds.jsonl.xz`
holds the rounds of every run, and what its result says of single sites and classes (see `packed_rounds`).

In `rounds.jsonl.xz` losses, weights, seconds of rounds, accuracies of classes and bins of scores keep five digits.
Everything else is exact, such as what tables average and compare.

Nothing here touches a file: `encode` makes the three files' bytes, `decode` and `decode_rounds` read them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from fedshift.errors import UserError
from fedshift.evaluation.packs.packed_rounds import (
    KEY,
    ROUNDS,
    cell_of,
    encode_rounds,
    leaves,
    name_of,
    nested,
    rounded,
    rows_of,
    shortened,
    value_of,
)
from fedshift.evaluation.records import RunResult
from fedshift.files import names_a_folder, plain_yaml
from fedshift.text import csv_cell, from_csv_cell

SETTINGS, RUNS = "experiment.yaml", "runs.csv"
FORMAT = 2
"""Format 1 has all digits, all fields of results in `runs.csv`, and lines of rounds as they were. It is read, too."""
_SHAREABLE = ("labelled", "unlabelled", "metric", "headline", "classes", "options", "data")
"""Fields that may move to `experiment.yaml`. All others are columns, even if every run has the same value."""
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

Cells = dict[str, str]


@dataclass(frozen=True)
class PackedRun:
    """The content of one finished run's folder.

    Attributes:
        result: the content of `result.json`.
        identity: the settings in `experiment.yaml`.
        rounds: the lines of `rounds.jsonl`; None if there is no such file, or if they were not read.
        line: the run's line in `runs.csv`, from 1.
    """

    result: Mapping[str, Any]
    identity: Mapping[str, Any]
    rounds: bytes | None = field(default=None, repr=False)
    line: int = 0

    @property
    def name(self) -> str:
        """`<method>/<target>/seed-<n>`: the run's folder below its experiment's."""
        return name_of(self.result)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of that folder and of those above it."""
        return str(self.result["method"]), str(self.result["target"]), f"seed-{self.result['seed']}"


def kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as packing keeps it: exact but for accuracies of classes and bins of scores, which have five digits.

    Example:
        >>> kept({"seconds": 1.23456789, "selected": {"last": {"accuracy": 200 / 3, "per_class": [200 / 3]}}})
        {'seconds': 1.23456789, 'selected': {'last': {'accuracy': 66.66666666666667, 'per_class': [66.667]}}}
    """
    return nested({path: _shortened(path, value) for path, value in leaves(result)})


def encode(runs: Iterable[PackedRun], order: Mapping[str, Any], columns: Sequence[str] = ()) -> dict[str, bytes]:
    """The three files by name. The same runs give the same bytes, whatever their order.

    Args:
        runs: the finished runs.
        order: the order of the plan: names of methods, targets and so on.
        columns: columns of the file that is replaced. Lines that stay keep their order of cells.

    Example:
        >>> run = PackedRun({"method": "fedavg", "target": "D0", "seed": 0, "seconds": 1.5}, {})
        >>> print(encode([run], {})["runs.csv"].decode(), end="")
        method,target,seed,seconds
        fedavg,D0,0,1.5
    """
    runs = [replace(run, result=kept(run.result)) for run in runs]
    runs.sort(key=lambda run: [run.result[field] for field in KEY])
    details = [{path: value for path, value in leaves(run.result) if _is_detail(path)} for run in runs]
    rows = [{path: cell for path, cell in _cells(run).items() if not _is_detail(path)} for run in runs]
    methods = [str(run.result["method"]) for run in runs]
    shared, by_method = _hoisted(rows, methods)
    above = set(shared).union(*by_method.values())
    rows = [{path: cell for path, cell in row.items() if path not in above} for row in rows]
    columns = _merged(rows, columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([csv_cell(row.get(column, "")) for column in columns] for row in rows)
    settings = {
        "format": FORMAT,
        "columns": _digest(columns),
        "order": dict(order),
        "all_runs": nested({path: value_of(cell) for path, cell in shared.items()}),
        "methods": {
            method: nested({path: value_of(cell) for path, cell in cells.items()})
            for method, cells in sorted(by_method.items())
            if cells
        },
    }
    rounds = b"".join(
        encode_rounds(run.result, rows_of(run.rounds), own) for run, own in zip(runs, details, strict=True)
    )
    return {
        ROUNDS: lzma.compress(rounds, preset=9 | lzma.PRESET_EXTREME),
        SETTINGS: yaml_bytes(settings),
        RUNS: text.getvalue().encode(),
    }


def decode(
    settings: bytes, runs: bytes, place: str = ""
) -> tuple[dict[str, PackedRun], dict[str, Any], list[str], int]:
    """Read `experiment.yaml` and `runs.csv`.

    Args:
        settings: content of `experiment.yaml`.
        runs: content of `runs.csv`.
        place: the folder of both, for messages.

    Returns:
        The runs by name, without what is in `rounds.jsonl.xz`; the planned order; the columns; the format's number.

    Raises:
        UserError: one of the two is malformed. The message names the file and the line.

    Example:
        >>> files = encode([PackedRun({"method": "fedavg", "target": "D0", "seed": 0}, {})], {"seeds": [0]})
        >>> runs, *others = decode(files["experiment.yaml"], files["runs.csv"])
        >>> list(runs), others
        (['fedavg/D0/seed-0'], [{'seeds': [0]}, ['method', 'target', 'seed'], 2])
    """
    shared, by_method, order, digest, number_of_format = _settings(settings, f"{place}{SETTINGS}")
    file = f"{place}{RUNS}"
    found: dict[str, PackedRun] = {}
    columns: list[str] = []
    number = 0
    try:
        reader = csv.reader(io.StringIO(runs.decode(), newline=""), strict=True)
        for row in reader:
            number, before = reader.line_num, number
            if not columns:
                columns = row
                if _digest(columns) != digest or not set(KEY) <= set(columns):
                    raise ValueError(f"its columns are not those that {SETTINGS} was written for")
                continue
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} cells for {len(columns)} columns")
            own = {column: value_of(from_csv_cell(cell)) for column, cell in zip(columns, row, strict=True) if cell}
            run = _run(own, shared, by_method, before + 1)
            if run.name in found:
                raise ValueError(f"{run.name} is already in line {found[run.name].line}")
            found[run.name] = run
    except (ValueError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            number = runs[: error.start].count(b"\n") + 1
        elif isinstance(error, csv.Error):
            number += 1  # the row that could not be read
        raise UserError(f"{file} line {number} is malformed ({error}): repair it, or restore the file") from None
    if not columns:
        raise UserError(f"{file} line 1 is malformed (no columns): restore the file")
    return found, order, columns, number_of_format


def with_details(run: PackedRun, details: Mapping[str, Any]) -> PackedRun:
    """The run with those fields of its result, by path, that are in `rounds.jsonl.xz`.

    Raises:
        ValueError: they are not such fields.

    Example:
        >>> run = PackedRun({"selected": {"last": {"round": 3}}}, {})
        >>> with_details(run, {"selected.last.per_class": [50.0]}).result
        {'selected': {'last': {'round': 3, 'per_class': [50.0]}}}
    """
    if not all(map(_is_detail, details)):
        raise ValueError("a field of a result that is not kept here")
    return replace(run, result=_in_order(nested({**dict(leaves(run.result)), **details})))


def yaml_bytes(content: Mapping[str, Any]) -> bytes:
    """A mapping as YAML, in the form in which a run's files are written.

    Example:
        >>> yaml_bytes({"rounds": 2, "name": "demo"}).decode().split()
        ['rounds:', '2', 'name:', 'demo']
    """
    text: str = yaml.dump(content, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    return text.encode()


def _is_detail(path: str) -> bool:
    """Whether a field of a result is about a single site or class. It is kept with the rounds."""
    field, *below = path.split(".")
    if field == "selected":
        return below[1:2] in (["sites"], ["per_class"])
    return path == "sites" or field == "bytes_by_site" or (field == "data" and len(below) > 1)


def _shortened(path: str, value: Any) -> Any:
    if path == "sites":
        return shortened(value)
    return rounded(value) if path.startswith("selected.") and path.endswith(".per_class") else value


def _cells(run: PackedRun) -> Cells:
    """Every field of a run as text. Of the identity only what differs from the options, which is usually nothing."""
    result = {**{field: run.result[field] for field in KEY}, **run.result}
    cells = {path: cell_of(value) for path, value in leaves(result)}
    options = {path: cell_of(value) for path, value in leaves(run.result.get("options") or {})}
    identity = {path: cell_of(value) for path, value in leaves(run.identity)}
    absent = [path for path in options if path not in identity]
    if absent:
        cells["identity"] = cell_of(absent)
    cells |= {f"identity.{path}": cell for path, cell in identity.items() if options.get(path) != cell}
    return cells


def _run(
    own: Mapping[str, Any], shared: Mapping[str, Any], by_method: Mapping[str, Mapping[str, Any]], line: int
) -> PackedRun:
    """A run from its line.

    Raises:
        ValueError: the line is not one of a run.
    """
    if not isinstance(own.get("method"), str) or not isinstance(own.get("target"), str):
        raise ValueError("method and target must be names")
    if not names_a_folder(own["method"]) or not names_a_folder(own["target"]):
        raise ValueError("method and target must be names of folders")
    if type(own.get("seed")) is not int or not -(2**63) <= own["seed"] < 2**63:
        raise ValueError("seed must be a whole number of at most 64 bits")
    of_method = by_method.get(own["method"], {})
    values = {**shared, **of_method, **own}
    if len(values) < len(shared) + len(of_method) + len(own):
        raise ValueError(f"a column is also in {SETTINGS}")
    absent = values.pop("identity", [])
    changed = {path: values.pop(path) for path in [*values] if path.startswith("identity.")}
    result = nested(values)
    options = dict(leaves(result.get("options") or {}))
    identity = {path: value for path, value in options.items() if path not in absent}
    identity |= {path.removeprefix("identity."): value for path, value in changed.items()}
    return PackedRun(_in_order(result), nested(identity), line=line)


def _in_order(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with its fields in the order of `RunResult`."""
    known = [name for name in RunResult.model_fields if name in result]
    return {name: result[name] for name in [*known, *(name for name in result if name not in known)]}


def _settings(data: bytes, file: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any], str, int]:
    """Fields of all runs, fields of each method's runs, the planned order, the digest of the columns, the format."""
    try:
        found = plain_yaml(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UserError(f"{file} line {line} is malformed (not YAML): repair it, or restore the file") from None
    if not isinstance(found, dict) or found.get("format") not in range(1, FORMAT + 1):
        raise UserError(
            f"{file} line 1 is malformed (it should say format: {FORMAT}, or an older one): restore the file"
        )
    try:
        shared = dict(leaves(found["all_runs"]))
        by_method = {method: dict(leaves(fields)) for method, fields in found["methods"].items()}
        return shared, by_method, dict(found["order"]), str(found["columns"]), int(found["format"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file} line 1 is malformed ({error!s} is missing or not a mapping): restore the file"
        ) from None


def _hoisted(rows: Sequence[Cells], methods: Sequence[str]) -> tuple[Cells, dict[str, Cells]]:
    """Cells that all rows share, and for each method the options that all of its rows share."""
    first = rows[0] if rows else {}
    shared = {
        path: cell
        for path, cell in first.items()
        if path.split(".")[0] in _SHAREABLE and all(row.get(path) == cell for row in rows)
    }
    by_method: dict[str, list[Cells]] = {}
    for method, row in zip(methods, rows, strict=True):
        by_method.setdefault(method, []).append(row)
    options = {path for row in rows for path in row if path.startswith("options.")} - shared.keys()
    fixed = {
        path
        for path in options
        if all(len({row.get(path) for row in of_method}) == 1 for of_method in by_method.values())
    }
    own = {
        method: {path: cell for path, cell in of_method[0].items() if path in fixed}
        for method, of_method in by_method.items()
    }
    return shared, own


def _merged(rows: Sequence[Mapping[str, str]], before: Sequence[str]) -> list[str]:
    """All columns of the rows. Those of ``before`` come first; a new one keeps its place among its row's columns."""
    used = set[str]().union(*rows)
    columns = [column for column in before if column in used]
    known = set(columns)
    for row in rows:
        if row.keys() <= known:
            continue
        place = 0
        for path in row:
            if path not in known:
                columns.insert(place, path)
                known.add(path)
                place += 1
            else:
                place = columns.index(path) + 1
    return columns


def _digest(columns: Sequence[str]) -> str:
    """A short digest that shows whether `experiment.yaml` and `runs.csv` were written together."""
    return "sha256-" + hashlib.sha256("\n".join(columns).encode()).hexdigest()[:12]
