"""The section ``data`` of an experiment file: a data set by name, or samples in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedshift.data import registry as data_registry
from fedshift.data.builders.table_labels import Condition
from fedshift.data.domain import DataSource
from fedshift.data.in_memory import InMemory, samples_in
from fedshift.errors import UserError
from fedshift.experiment.config.error_messages import describe


def named(value: Any, path: str) -> dict[str, Any]:
    """A section that is a mapping with a name, or a name alone.

    Args:
        value: the section.
        path: where it stands in the file, for messages.

    Raises:
        UserError: it is neither.
    """
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping with a name, not {value!r}")
    return dict(value)


def data_source(value: Any, folder: Path) -> DataSource:
    """The data source of a ``data:`` section.

    Args:
        value: the section.
        folder: relative paths are relative to this folder.

    Raises:
        UserError: as in `parse`.
    """
    if isinstance(value, DataSource):
        return value
    if isinstance(value, Mapping) and value and "name" not in value:
        if isinstance(value.get("sites"), Mapping) and not all(map(_is_plain, value["sites"].values())):
            value = _described(**value)
        elif not all(map(_is_plain, value.values())):
            value = _described(value)
    fields = _with_paths(named(value, "data"), folder)
    if isinstance(fields.get("unseen"), Mapping):  # the coordinator's own data, besides those at sites
        fields["unseen"] = _with_paths(dict(fields["unseen"]), folder)
    try:
        return data_registry.parse(fields)
    except ValidationError as error:
        raise UserError(describe(error, "data", data_registry.source_class(str(fields.get("name"))))) from None


def _is_plain(value: Any) -> bool:
    """Whether a value can stand in an experiment file."""
    return value is None or isinstance(value, str | int | float | Path | Mapping | list)


def _with_paths(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a data source, with its paths below ``folder``."""
    name = fields.get("name")
    paths = data_registry.source_class(name).paths() if isinstance(name, str) else ()
    return fields | {path: _below(fields[path], folder) for path in paths if path in fields}


def _below(value: Any, folder: Path) -> Any:
    """``value`` with its relative paths below ``folder``, except those that exist in the working directory only."""
    if isinstance(value, Mapping):
        return {key: _below(item, folder) for key, item in value.items()}
    if not isinstance(value, str | Path):
        return value
    path = Path(value).expanduser()
    beside = folder / path
    return str(beside if path.is_absolute() or beside.exists() or not path.exists() else path)


def _described(sites: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The ``data:`` section for samples in memory: a table if all are data frames, else arrays.

    Args:
        sites: site → (inputs, labels), data frame or data set.
        options: further fields of the section.

    Returns:
        Its fields. The columns of a table are numeric or categorical by their types, unless ``options`` names them.

    Raises:
        UserError: a site's samples are not recognised, or are data frames without labels and without ``label``.
    """
    try:
        held = {str(site): samples_in(value) for site, value in sites.items()}
        condition = Condition.parse(options["positive"]) if isinstance(options.get("positive"), str) else None
    except ValueError as error:
        raise UserError(f"data: {error}") from None
    frames = [one for one in held.values() if isinstance(one, InMemory) and one.is_frame]
    if len(frames) < len(held) or not frames:
        return {"name": "arrays", "sites": held, **options}
    fields: dict[str, Any] = {"name": "table", "sites": held, **options}
    if condition is None and "label" not in fields:
        if any(one.labels is None for one in frames):
            raise UserError("data: data frames without labels need label, the name of their label column")
        fields["label"] = "label" if "label" not in frames[0].samples.columns else "label of the sample"
    if "numeric" not in fields and "categorical" not in fields:
        taken = {condition.column if condition is not None else fields.get("label"), fields.get("id")}
        first = frames[0].samples
        names = [name for name in first.columns if str(name) not in taken]
        fields["numeric"] = [str(name) for name in names if _is_numeric(first[name])]
        fields["categorical"] = [str(name) for name in names if not _is_numeric(first[name])]
    return fields


def _is_numeric(column: Any) -> bool:
    return np.asarray(column).dtype.kind in "biuf"
