"""The section ``data`` of an experiment file: a data set by name, or samples in memory."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, ValidationError

from fedshift.data import registry as data_registry
from fedshift.data.builders.own import data_section
from fedshift.data.databases import below, is_address
from fedshift.data.domain import DataSource
from fedshift.errors import UserError
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.config.experiment_file import with_name
from fedshift.import_paths import place_of


def data_source(value: Any, folder: Path) -> DataSource:
    """The data source of a ``data:`` section.

    ``folder``: relative paths are relative to this folder. UserError as in `parse`.
    """
    if isinstance(value, DataSource):
        return value
    if isinstance(value, Mapping) and value and "name" not in value:
        if isinstance(value.get("sites"), Mapping) and not all(map(_is_plain, value["sites"].values())):
            value = data_section(**value)
        elif not all(map(_is_plain, value.values())):
            value = data_section(value)
    try:
        fields = _with_paths(with_name(value, "data"), folder)
    except (ValueError, TypeError, NameError) as error:  # raised by the import of a user's own file
        raise UserError(f"data: '{value}' cannot be imported: {error}") from error
    if isinstance(fields.get("unseen"), Mapping):  # the coordinator's own data, besides those at sites
        fields["unseen"] = _with_paths(dict(fields["unseen"]), folder)
    try:
        return data_registry.parse(fields, folder)
    except PydanticUserError as error:  # a field's type in a user's own file cannot be understood
        raise UserError(f"data: '{fields['name']}' cannot be used: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        raise UserError(describe(error, "data", data_registry.source_class(str(fields.get("name")), folder))) from None


def data_name(source: DataSource) -> str:
    """The name by which the registry finds the builder on this machine."""
    return place_of(type(source)) if data_registry.is_own(source) else source.name


def own_file_record(import_path: str, kind: type) -> dict[str, str]:
    """The name of a class in a user's own file, without a path of this machine, and the file's checksum.

    ``import_path``: the import path of the class; another class than one in a ``.py`` file is named by it alone.
    """
    file, _, name = import_path.rpartition(":")
    if not file.endswith(".py"):
        return {"name": import_path}
    checksum = getattr(sys.modules[kind.__module__], "__sha256__", None)
    return {
        "name": f"{Path(file).name}:{name}",
        "sha256": checksum or hashlib.sha256(Path(file).read_bytes()).hexdigest(),
    }


def _is_plain(value: Any) -> bool:
    """Whether a value can stand in an experiment file."""
    return value is None or isinstance(value, str | int | float | Path | Mapping | list)


def _with_paths(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a data source, with its paths below ``folder``."""
    name = fields.get("name")
    paths = data_registry.source_class(name, folder).paths() if isinstance(name, str) else ()
    return fields | {path: _below(fields[path], folder) for path in paths if path in fields}


def _below(value: Any, folder: Path) -> Any:
    """``value`` with its relative paths below ``folder``, except those that exist in the working directory only."""
    if isinstance(value, Mapping):
        return {key: _below(item, folder) for key, item in value.items()}
    if not isinstance(value, str | Path):
        return value
    if isinstance(value, str) and is_address(value):
        return below(value, lambda file: str(_below(file, folder)))
    path = Path(value).expanduser()
    beside = folder / path
    return str(beside if path.is_absolute() or beside.exists() or not path.exists() else path)
