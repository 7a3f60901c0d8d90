"""The command line as a function, for tests that do not need a process of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Said:
    """What a call of the command line left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one line of a mistake; fails when there was none, more than one, or a traceback."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.startswith("error: "), self.err
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call ``fedshift ARGUMENTS`` in this process. Its pages have empty figures, since to draw them takes longest."""
    from fedshift.cli import main

    monkeypatch.setattr("fedshift.report.plots.svg", lambda figure, description: "<svg></svg>")
    return called("fedshift", main, monkeypatch, capsys)


def called(
    name: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """The command line ``name``, whose function is ``main``, as a function of its arguments."""
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return call
