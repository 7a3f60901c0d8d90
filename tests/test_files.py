"""Files that are written at once, and locks: whose they are, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from fedshift.digests import BLANK, ENTRY, fill_digest
from fedshift.errors import UserError
from fedshift.files import ScratchFolder, below, hold_lock, write_bytes

SERVICE = 65534
"""A user of its own."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator may give files away")
def test_the_administrator_leaves_files_to_the_service(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    os.chown(folder, SERVICE, SERVICE)
    write_bytes(folder / "new", b"1", private=True)
    with hold_lock(folder / "lock"):
        pass
    (folder / "ours").write_bytes(b"1")
    write_bytes(folder / "ours", b"2")
    os.chown(folder, 0, 0)
    write_bytes(folder / "new", b"2", private=True)
    assert {file.name: file.stat().st_uid for file in folder.iterdir()} == dict.fromkeys(
        ("new", "lock", "ours"), SERVICE
    )


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of one that lives."""
    code = (
        "import sys, time\nfrom fedshift.files import ScratchFolder\nfolder = ScratchFolder('test')\n"
        "(folder.path / 'patients').write_text('x')\nprint(folder.path, flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    alive, dead = (Path(one.stdout.readline().strip()) for one in running if one.stdout is not None)
    running[1].kill()
    running[1].communicate()
    assert (dead / "patients").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = ScratchFolder("test")
    assert sorted(path for path in tmp_path.iterdir() if path.is_dir()) == sorted([alive, mine.path])
    assert (alive / "patients").exists()
    mine.remove()
    running[0].kill()
    running[0].communicate()
    assert not mine.path.exists()


def test_what_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for write in (lambda: write_bytes(tmp_path / "runs" / "e" / "order.json", b""), lambda: _lock(tmp_path / "runs/l")):
        with pytest.raises(UserError, match="runs") as raised:
            write()
        assert "free some space" not in str(raised.value)
    (tmp_path / "there" / "file").mkdir(parents=True)
    with pytest.raises(UserError):
        write_bytes(tmp_path / "there" / "file", b"x")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def _lock(path: Path) -> None:
    with hold_lock(path):
        pass


def test_equal_models_are_equal_files() -> None:
    """The library that writes them puts the entries of the metadata in another order each time."""
    made = {fill_digest(save({"w": np.ones(3)}, {"fedshift": '{"é": 1}', ENTRY: BLANK})) for _ in range(30)}
    assert len(made) == 1


def test_a_link_within_a_folder_is_followed_and_one_that_leads_out_is_not(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", tmp_path / "outside"
    (root / "inside").mkdir(parents=True)
    outside.mkdir()
    (root / "near").symlink_to(root / "inside")
    (root / "away").symlink_to(outside)
    assert below(root, "near", "a").resolve() == (root / "inside" / "a").resolve()
    with pytest.raises(UserError, match=r"away/a leads out of .*runs by a link"):
        below(root, "away", "a")
