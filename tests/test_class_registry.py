"""Classes by name: what is found, what is imported when, and what a person is told."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from fedshift.class_registry import ClassRegistry
from fedshift.errors import FedshiftError, UserError
from fedshift.import_paths import import_file
from fedshift.trust import own_module

PLACES = {"known": "fedshift.errors:UserError", "refused": "fedshift.errors:Refused", "gone": "fedshift.nowhere:Gone"}


def registry(*, own: bool = True) -> ClassRegistry[FedshiftError]:
    return ClassRegistry("error", FedshiftError, PLACES, own_module=own_module if own else None)


def test_names_are_found_and_nothing_is_imported_before() -> None:
    assert registry().names() == tuple(PLACES)
    assert "gone" in registry()
    assert registry().find("known") is UserError


@pytest.mark.parametrize("own", [False, True])
def test_an_unknown_name_is_told_with_the_nearest(own: bool) -> None:
    with pytest.raises(UserError, match=r"'knwon'.*'known'") as caught:
        registry(own=own).find("knwon")
    assert ("file.py:Class" in str(caught.value)) is own


@pytest.mark.parametrize("options", [{}, {"name": 3}, {"name": None}])
def test_a_missing_name_is_told_with_its_field_and_all_names(options: dict[str, object]) -> None:
    assert registry().name_in({"name": "known"}, "errors.name") == "known"
    with pytest.raises(UserError, match=r"^errors\.name: .*gone, known, refused"):
        registry().name_in(options, "errors.name")


def test_own_classes_come_from_files_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from fedshift.errors import UserError\nclass Mine(UserError): pass\n")
    for name, folder in (("mine.py:Mine", tmp_path), (f"{tmp_path / 'mine.py'}:Mine", None)):
        assert registry().find(name, folder=folder).__name__ == "Mine"
    assert registry().find("fedshift.errors:Refused").__name__ == "Refused"
    with pytest.raises(UserError, match=r"'Mime'.*FedshiftError.*'Mine'\? known: Mine$"):
        registry().find("mine.py:Mime", folder=tmp_path)
    with pytest.raises(UserError, match=r"unknown error"):
        registry(own=False).find("fedshift.errors:Refused")


@pytest.mark.parametrize("name", ["nowhere.py:Mine", "fedshift.nowhere:Mine", "broken.py:Mine"])
def test_what_cannot_be_imported_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    with pytest.raises(UserError, match=r"cannot be imported|there is no file"):
        registry().find(name, folder=tmp_path)


def test_permission_is_asked_before_anything_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nsys.ran_without_permission = True\n")

    def permit(name: str) -> None:
        raise UserError(f"'{name}' is not permitted")

    with pytest.raises(UserError, match="not permitted"):
        registry().find("mine.py:Mine", folder=tmp_path, permit=permit)
    assert not hasattr(sys, "ran_without_permission")


def test_files_beside_a_users_file_are_imported_and_part_of_its_checksum(tmp_path: Path) -> None:
    def written(folder: str, width: int, deep: int) -> Path:
        (tmp_path / folder / "own_parts").mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "own_blocks.py").write_text(f"from own_parts.deep import DEEP\nWIDTH = {width}")
        (tmp_path / folder / "own_parts" / "deep.py").write_text(f"DEEP = {deep}")
        file = tmp_path / folder / "own.py"
        file.write_text("import own_blocks as b\n\ndef late():\n    import own_later\n    return own_later.LATE\n")
        (tmp_path / folder / "own_later.py").write_text("LATE = 7")
        return file

    path = list(sys.path)
    try:
        first = import_file(str(written("one", 1, 2)))
        assert (first.b.WIDTH, first.b.DEEP, first.late()) == (1, 2, 7)
        assert import_file(str(written("one", 1, 2))) is first
        wider, deeper = import_file(str(written("one", 3, 2))), import_file(str(written("one", 3, 4)))
        elsewhere = import_file(str(written("two", 5, 6)))
        found = [(module.b.WIDTH, module.b.DEEP) for module in (first, wider, deeper, elsewhere)]
        assert found == [(1, 2), (3, 2), (3, 4), (5, 6)]
        assert len({module.__sha256__ for module in (first, wider, deeper, elsewhere)}) == 4
        written_by_us = [path for path in tmp_path.rglob("*.pyc") if "own_later" not in path.name]
        assert not written_by_us  # what a call imports later is compiled by Python, as ever
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
    alone = tmp_path / "alone.py"
    alone.write_text("import json\nimport torch\n")
    assert import_file(str(alone)).__sha256__ == hashlib.sha256(alone.read_bytes()).hexdigest()
