"""What does not fit into memory is one line and exit code 2, whatever was at work."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import Cli
from small import experiment, sites, write

from fedshift.data.builders.arrays import Arrays
from fedshift.data.sizes import VARIABLE
from fedshift.experiment.runs import round_loop


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "e.yaml", experiment(sites(tmp_path)))


@pytest.mark.case("out of memory", "check and run: a file that declares too much")
def test_a_file_that_declares_too_much(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (70368744177664, 5), }".ljust(117) + b"\n"
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00\x76\x00" + header)
    for command in ("check", "run"):
        said = cli(command, file, "--runs", tmp_path / "runs") if command == "run" else cli(command, file)
        assert "b.npz" in said.error()
        assert VARIABLE in said.error()
    monkeypatch.setenv(VARIABLE, "much")
    assert VARIABLE in cli("check", file).error()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), marks=pytest.mark.case("out of memory", "MemoryError while data are prepared")),
        pytest.param(
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
            marks=pytest.mark.case("out of memory", "torch's error while data are prepared"),
        ),
    ],
)
def test_no_memory_while_data_are_prepared(
    error: Exception, cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Arrays, "build", fail)
    assert "memory" in cli("check", file).error()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), marks=pytest.mark.case("out of memory", "MemoryError in a round")),
        pytest.param(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            marks=pytest.mark.case("out of memory", "an accelerator's memory in a round"),
        ),
    ],
)
def test_no_memory_in_a_round(
    error: Exception, cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(round_loop._RunLoop, "to_the_end", fail)
    result = cli("run", file, "--runs", tmp_path / "runs")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("error: out of memory on cpu")
    assert "Traceback" not in result.err
