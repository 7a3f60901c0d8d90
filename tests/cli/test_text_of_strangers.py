"""What sites, data and model files bring along does not command the terminal or the spreadsheet that shows it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from calling import Cli, Said
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from small import experiment, sites

import fedshift
from fedshift.cli.console import escape, safe_console

NASTY = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202eno"


def harmless(said: Said) -> str:
    """All that a command printed, if a terminal may see it."""
    assert "no" in said.out + said.err
    for letter in said.out + said.err:
        assert letter.isprintable() or letter == "\n", repr(letter)
    return said.out + said.err


@pytest.mark.threat("control_text")
def test_a_console_prints_no_control_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(NASTY)
    table.add_row(f"no {NASTY}")
    console = safe_console()
    for thing in (NASTY, f"[bold]{NASTY}[/bold]", table):
        console.print(thing)
    console.print(NASTY, markup=False, highlight=False, soft_wrap=True)
    harmless(Said(0, capsys.readouterr().out, ""))
    assert escape(NASTY).isprintable()


@pytest.mark.threat("control_text")
def test_a_deployment_shows_what_sites_said(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")
    from fedshift.deploy.cli.deploy import _show
    from fedshift.deploy.flare.deployment_folder import Deployment

    file = tmp_path / "project.yaml"
    contact = ("--server", "localhost", "--contact", "a@example.org")
    assert cli("project", "init", file, "--site", "north", *contact).code == 0
    assert cli("project", "provision", file, "--no-passphrase", "--out", tmp_path).code == 0
    kit = tmp_path / "federation" / "coordinator"
    deployment = Deployment(kit, "study")
    deployment.want("run")
    deployment.set_state("failed", message=NASTY, exit_code=2)
    events: list[dict[str, Any]] = [
        {"what": "fit", "site": "north", "is": "lost", "reason": NASTY, "round": 4, "exchange": 3},
        {"what": "warning", "message": NASTY},
        {"what": "round", "method": NASTY, "target": NASTY, "seed": 0, "round": 3, "accuracy": 81.0},
        {"what": "site", "site": NASTY, "is": NASTY},
    ]
    for event in events:
        deployment.record(event)
    harmless(cli("deploy", "status", "--kit", kit))
    harmless(cli("deploy", "logs", "--kit", kit))
    for event in events:
        _show(event, replies=True)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == len(events)
    harmless(Said(0, shown, ""))


def test_an_error_is_one_line_whatever_it_quotes(cli: Cli, tmp_path: Path) -> None:
    assert harmless(cli("run", tmp_path / NASTY)).count("\n") == 1


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model file whose classes are formulas and control sequences, and data to predict."""
    folder = tmp_path_factory.mktemp("hostile")
    options = experiment(
        sites(folder),
        protocol={"targets": ["a"], "seeds": [0], "test_fraction": 0.25},
        model={"name": "linear"},
        methods=[{"name": "fedavg"}],
    )
    whole = fedshift.run(options, folder / "runs").folder / "fedavg" / "a" / "seed-0" / "model.safetensors"
    with safe_open(whole, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["fedshift"])
    metadata["classes"] = ["=HYPERLINK(1)", "@no", f"-no{NASTY}"]
    save_file(tensors, folder / "model.safetensors", {"fedshift": json.dumps(metadata)})
    return folder / "model.safetensors", Path(options["data"]["sites"]["a"])


@pytest.mark.parametrize("format", ["terminal", "json"])
def test_predictions_do_not_command_the_terminal(format: str, cli: Cli, hostile: tuple[Path, Path]) -> None:
    text = harmless(cli("predict", *hostile, "--format", format))
    if format == "json":
        assert set(json.loads(text)[0]["probabilities"]) == {"=HYPERLINK(1)", "@no", f"-no{NASTY}"}


@pytest.mark.threat("formula")
def test_predictions_are_no_formulas(cli: Cli, hostile: tuple[Path, Path]) -> None:
    rows = list(csv.reader(io.StringIO(cli("predict", *hostile, "--format", "csv").out, newline="")))
    assert rows[0][3:5] == ["'=HYPERLINK(1)", "'@no"]
    assert len(rows) > 5
    for row in rows[1:]:
        assert row[1].startswith("'")
        assert row[2].startswith("'")
        assert sum(float(cell) for cell in row[3:]) == pytest.approx(1, abs=1e-4)
