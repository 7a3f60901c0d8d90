"""A shared disk that is really full: one line, and nothing lost or written twice when there is space again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from calling import Cli
from small import experiment, outcome, sites, write

import fedshift

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", folder]).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_one_line(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    options = experiment(
        sites(tmp_path),
        protocol={"targets": ["a", "b", "c"], "seeds": [0, 1], "test_fraction": 0.3},
        training={"rounds": 12, "batch_size": 8},
    )
    file, runs = write(tmp_path / "e.yaml", options), tiny / "runs"
    for _ in range(2):
        refused = cli("run", file, "--runs", runs)
        assert refused.code == 2
        last = refused.err.splitlines()[-1]
        assert last.startswith("error: cannot write")
        assert "No space left on device" in last
        assert "free some space" in last
    assert 0 < len(list(runs.rglob("result.json"))) < 6
    subprocess.run(["mount", "-o", "remount,size=64m", tiny], check=True)
    assert cli("run", file, "--runs", runs).code == 0
    fedshift.run(options, tmp_path / "whole")
    assert outcome(runs) == outcome(tmp_path / "whole")
    assert not [*runs.rglob(".*.part"), *runs.rglob(".claim*")]
