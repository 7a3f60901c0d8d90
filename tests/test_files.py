"""Files that are written at once, and locks: whose they are, and what is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedshift.errors import UserError
from fedshift.files import locked, write_bytes

SERVICE = 65534
"""A user of its own."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator may give files away")
def test_the_administrator_leaves_files_to_the_service(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    os.chown(folder, SERVICE, SERVICE)
    write_bytes(folder / "new", b"1", private=True)
    with locked(folder / "lock"):
        pass
    (folder / "ours").write_bytes(b"1")
    write_bytes(folder / "ours", b"2")
    assert {file.name: file.stat().st_uid for file in folder.iterdir()} == dict.fromkeys(
        ("new", "lock", "ours"), SERVICE
    )


def test_a_path_through_a_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for write in (lambda: write_bytes(tmp_path / "runs" / "e" / "order.json", b""), lambda: _lock(tmp_path / "runs/l")):
        with pytest.raises(UserError, match="runs") as raised:
            write()
        assert "free some space" not in str(raised.value)


def _lock(path: Path) -> None:
    with locked(path):
        pass


def test_nothing_is_left_beside_a_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "there" / "file").mkdir(parents=True)
    with pytest.raises(UserError):
        write_bytes(tmp_path / "there" / "file", b"x")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
