"""Reads an experiment file and sets overrides, before anything is made of it. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedshift.errors import UserError, nearest
from fedshift.experiment.config.known_fields import check_known, experiment_fields
from fedshift.files import edited_yaml

NAME = re.compile(r"(?!\.)[\w.-]+")
"""What can name a folder."""


def with_name(value: Any, path: str) -> dict[str, Any]:
    """A section that is a mapping with a name, or a name alone. UserError if it is neither."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping with a name, not {value!r}")
    return dict(value)


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The content of an experiment file, with overrides.

    ``overrides``: fields to set, as ``key.path=value``. UserError if it cannot be read, or an override cannot be set.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UserError(f"cannot read the experiment file {path}: {reason}") from None
    try:
        options = edited_yaml(text, path)
    except RecursionError:
        raise UserError(f"{path}: its lists and mappings are nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where} is not YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from None
    if not isinstance(options, dict):
        raise UserError(f"{path}: an experiment file is a mapping of name, data, protocol, model, training, methods …")
    for override in overrides:
        override_field(options, override)
    if "name" not in options and not NAME.fullmatch(path.stem):
        raise UserError(
            f"name: the file's name, '{path.stem}', cannot name a folder: write name: with letters, digits, '-', '_' "
            "and '.' only"
        )
    options.setdefault("name", path.stem)
    return options


def refuse_slips(path: Path, overrides: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be read, or names a field that there is not, without torch.

    UserError as in `read` and `check_known`.
    """
    check_known(read(path, overrides))


def override_field(options: dict[str, Any], override: str) -> None:
    """Set a field of raw options in place.

    ``override``: ``key.path=value``. The value is YAML. The key of a list entry is its number, or its label or name.
    UserError if the override is malformed or its path does not exist.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"override '{override}': write it as key.path=value, such as training.rounds=10")
    try:
        value = edited_yaml(text, f"override '{override}'")
    except yaml.YAMLError:
        if len(text) != 1:  # a sign such as a comma is what it is
            raise UserError(f"override '{override}': the value is not YAML") from None
        value = text
    keys = path.split(".")
    if keys[0] not in experiment_fields():
        raise UserError(f"override '{path}': there is no such field; {nearest(keys[0], experiment_fields())}")
    index: Any = options
    for number, key in enumerate(keys[:-1], 1):
        index = _below(index, key, ".".join(keys[:number]), path)
    index[_index(index, keys[-1], path) if isinstance(index, list) else keys[-1]] = value


def _below(section: Any, key: str, where: str, path: str) -> Any:
    """What ``key`` names in a mapping or a list, written out where it is short for a mapping or not there yet."""
    if isinstance(section, list):
        index = _index(section, key, where)
        section[index] = with_name(section[index], where)
        return section[index]
    if isinstance(section.get(key), str) and key in ("data", "model"):
        section[key] = {"name": section[key]}
    if section.setdefault(key, {}) is None:
        section[key] = {}
    if not isinstance(section[key], dict | list):
        raise UserError(
            f"override '{path}': {where} is not a mapping; write it as in the experiment file, such as "
            f"training.rounds=10 (got '{path}')"
        )
    return section[key]


def _index(items: list[Any], key: str, where: str) -> int:
    if key.isdecimal():
        if int(key) < len(items):
            return int(key)
        raise UserError(f"override '{where}': the list has {len(items)} entries")
    labels = [str(item.get("label") or item.get("name")) if isinstance(item, dict) else str(item) for item in items]
    if key not in labels:
        raise UserError(f"override '{where}': the list has no entry '{key}'; {nearest(key, labels)}")
    return labels.index(key)
