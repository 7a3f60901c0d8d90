"""Grids in terminals of any width: every cell is there, whole, in a line that fits."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedshift.cli.console import safe_console
from fedshift.report.collect import collect
from fedshift.report.folding import Folded
from fedshift.report.report import report_of
from fedshift.report.table_formats import terminal

Write = Callable[..., Path]
Row = dict[str, str]


def printed(thing: object, width: int) -> list[str]:
    """The lines that a terminal of a width shows."""
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(thing)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def blocks_of(lines: list[str]) -> list[list[list[str]]]:
    """The blocks of a grid without rule, each a list of rows of cells without spaces."""
    found: list[list[list[str]]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.split())
        else:
            found.append([])
    return found


@settings(max_examples=60, deadline=None)
@given(
    methods=st.lists(st.text("abc-+", min_size=1, max_size=12), min_size=1, max_size=5, unique=True),
    targets=st.lists(st.text("xyz_", min_size=1, max_size=14), min_size=1, max_size=9, unique=True),
    width=st.integers(32, 130),
    data=st.data(),
)
def test_blocks_hold_every_cell_once(methods: list[str], targets: list[str], width: int, data: st.DataObject) -> None:
    cell = st.sampled_from(["1.00", "70.00±1.25", "12345.67±0.5"])
    rows = [[name, *(data.draw(cell) for _ in targets)] for name in methods]
    lines = printed(Folded(["method", *targets], rows), width)
    assert max(map(len, lines)) <= width
    back: dict[str, Row] = {name: {} for name in methods}
    order: list[str] = []
    for head, *body in blocks_of(lines):
        assert head[0] == "method"
        order += head[1:]
        for name, *cells in body:
            back[name] |= dict(zip(head[1:], cells, strict=True))
    assert order == targets
    assert back == {name: dict(zip(targets, cells, strict=True)) for name, *cells in rows}


def test_blocks_names_and_words_fold() -> None:
    rows = [["fedavg", *["70.00 ±1.00"] * 5]]
    wide = Folded(["method", "a", "b", "c", "d", "e"], rows)
    sizes = {
        width: [len(head) - 1 for head, *_ in blocks_of(printed(wide, width))] for width in (80, 72, 60, 45, 33, 24)
    }
    assert sizes == {80: [5], 72: [5], 60: [3, 2], 45: [3, 2], 33: [2, 2, 1], 24: [1, 1, 1, 1, 1]}
    name = "a-method-with-a-name-that-is-longer-than-the-terminal-is-wide"
    lines = printed(Folded(["method", "east"], [[name, "70.00 ±1.00"]]), 40)
    assert max(map(len, lines)) <= 40
    assert sum("70.00 ±1.00" in line for line in lines) == 1, "the number stands in one line"
    assert "".join(line.split()[0] for line in lines[1:]) == name
    words = "sums of models, and single replies of the sites that hold no label at all"
    lines = printed(Folded(["method", "reads", "bytes"], [["fedavg", words, "1,234,567"]], words=(1,)), 48)
    assert max(map(len, lines)) <= 48
    assert " ".join(line.replace("1,234,567", "").replace("fedavg", "").strip() for line in lines[1:]).split() == (
        words.split()
    )
    assert len(blocks_of(lines)) == 1
    assert any("[red]no" in line for line in printed(Folded(["a", "b"], [["[red]no", "1"]]), 80))


@pytest.mark.parametrize("width", [8, 14, 20, 24])
def test_a_number_wider_than_the_terminal_folds(width: int) -> None:
    number = "12345678901234567890.123"
    lines = printed(Folded(["m", "east"], [["x", number]]), width)
    assert max(map(len, lines)) <= width
    assert "".join("".join(lines[1:]).split()).removeprefix("x") == number


@pytest.fixture
def long_ones(write_part: Write) -> Path:
    """Two methods at twelve targets, and the folder of the experiment."""
    for method in ("fedavg-with-momentum", "recipe-for-very-small-sites"):
        for place in range(12):
            for seed in range(2):
                folder = write_part(method, f"hospital-{place:02}", seed, 50.0 + place + seed)
    return folder.parents[2]


def test_few_methods_at_many_targets_stand_on_their_side(long_ones: Path) -> None:
    table = report_of(collect(long_ones)).table
    lines = printed(terminal(table), 80)
    first = next(number for number, line in enumerate(lines) if "average" in line)
    assert lines[first].split()[0] == "average", "a line for each target"
    assert max(map(len, lines)) <= 80
    for target in table.columns:
        (line,) = [line for line in lines[: first + 1] if line.split()[:1] == [target]]
        for method in table.methods:
            cell = table.cells[method][target]
            assert f"{cell.mean} ±{cell.error}" in line
    upright = printed(terminal(table), 300)
    assert sum(line.split()[:1] == ["average"] for line in upright) == 0, "there is room for a line for each method"


def test_elsewhere_a_row_is_a_line_and_nothing_is_cut(
    long_ones: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    table = report_of(collect(long_ones)).table
    safe_console().print(terminal(table))
    lines = capsys.readouterr().out.splitlines()
    for method in table.methods:
        line = next(line for line in lines if line.split()[:1] == [method])
        shown = [f"{cell.mean} ±{cell.error}" for cell in table.cells[method].values() if cell is not None]
        assert len(shown) == 13
        assert [text for text in shown if text not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 60])
def test_in_a_real_terminal(long_ones: Path, width: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "fedshift.cli", "table", str(long_ones)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm", "NO_COLOR": "1"}
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                more = os.read(ours, 1 << 16)
            except OSError:  # the process has ended
                break
            if not more:
                break
            shown += more
    os.close(ours)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= width
    wanted = json.loads(subprocess.run([*command, "--format", "json"], capture_output=True, check=True).stdout)
    text = "\n".join(lines)
    assert [row for row in wanted if f"{row['mean']:.2f} ±{row['standard_error']:.2f}" not in text] == []
