"""The scripts in examples/python run as they stand, and print what they promise."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import roc_auc_score

import fedshift
from fedshift.data.locate import find

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "python"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="examples/ is not beside these tests")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def play(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a script in an empty folder, which all share; give back what it printed."""

    def played(name: str) -> str:
        monkeypatch.chdir(place)
        monkeypatch.setenv("FEDSHIFT_CACHE", str(place / "cache"))
        monkeypatch.setattr(sys, "argv", [name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return capsys.readouterr().out

    return played


def test_your_table_and_reading_results(play: Callable[[str], str], place: Path) -> None:
    pytest.importorskip("pandas")
    table = play("your_table.py")
    results = fedshift.results(place / "runs" / "your_table")
    assert results.markdown() in table
    read = play("reading_results.py")
    assert all(f"{run.score():.2f}"[:4] in read for run in results.runs)
    worst = min(results.runs, key=lambda run: run.score() or 0)
    assert results.model(worst.method, worst.target, worst.seed).card() in read


def test_time_to_event(play: Callable[[str], str]) -> None:
    pytest.importorskip("pandas")
    line = next(line for line in play("time_to_event.py").splitlines() if "fedavg" in line)
    assert float(re.findall(r"\d+\.\d+", line)[0]) > 60


def test_your_images(play: Callable[[str], str], place: Path) -> None:
    printed = play("your_images.py")
    assert "street" in printed
    assert (place / "exported" / "model.pt").exists()
    assert (place / "exported" / "README.md").exists()


@pytest.mark.slow
def test_your_network(play: Callable[[str], str], place: Path) -> None:
    printed = play("your_network.py")
    assert "classifier: head, which reads 4 features" in printed
    results = fedshift.results(place / "runs" / "your_network")
    assert [run.method for run in results.runs] == ["fedavg", "csac"]
    assert results.markdown() in printed
    assert (place / "exported_network" / "model.pt").exists()


@pytest.mark.slow
def test_one_machine(play: Callable[[str], str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own processes, TLS over loopback, the model of the simulation, a table and a page; nothing runs afterwards."""
    pytest.importorskip("nvflare")
    from fedshift.cli import main

    out, err = io.StringIO(), io.StringIO()

    def kept(command: list[str], **options: Any) -> None:
        """The script's own command in this process, with kits that are left for the test to look at."""
        assert command[:3] == [sys.executable, "-m", "fedshift"]
        assert options == {"check": True}
        monkeypatch.setattr(sys, "argv", ["fedshift", *map(str, command[3:]), "--keep", "kept"])
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, err.getvalue()

    monkeypatch.setattr(subprocess, "run", kept)
    printed = play("one_machine.py")
    assert "the same model as in a simulation: yes" in printed
    (run,) = fedshift.results(place / "deployed" / "table").runs
    assert f"left the hospitals: {run.bytes_up}" in printed
    assert "fedavg" in out.getvalue()
    assert "round 1" in err.getvalue()
    assert (place / "deployed" / "table" / "report.html").exists()
    services = sorted((place / "kept").rglob("service.json"))
    assert len(services) == 3
    assert {json.loads(service.read_text())["state"] for service in services} == {"stopped"}


def test_your_method(play: Callable[[str], str]) -> None:
    printed = play("your_method.py")
    for method in ("fedavg", "trimmed_mean"):
        assert all(f"{method}, round {number}: " in printed for number in (1, 2, 3))


@pytest.mark.slow
@pytest.mark.skipif(find(["heart_disease_uci/processed.va.data"]) is None, reason="needs UCI's files")
def test_heart_disease(play: Callable[[str], str], place: Path) -> None:
    """AUROC is that of scikit-learn on the stored predictions; the page has it with intervals and base rates."""
    pandas = pytest.importorskip("pandas")
    printed = play("heart_disease.py")
    page = (place / "runs" / "heart" / "report.html").read_text()
    assert str(Path("runs") / "heart" / "report.html") in printed
    shares = {"cleveland": 54.13, "hungarian": 63.95, "switzerland": 93.5, "va": 74.5}
    for run in fedshift.results(place / "runs" / "heart").collected.runs:
        (target,) = run.result.targets
        assert target.majority == pytest.approx(shares[run.result.target], abs=0.01)
        kept = pandas.read_parquet(run.folder / "predictions.parquet").query("part == 'target'")
        auroc = target.values["auroc"]
        assert auroc / 100 == pytest.approx(roc_auc_score(kept.label == "positive", kept.score_positive), abs=1e-12)
        assert 60 < auroc < 100
        low, high = target.intervals["auroc"]
        assert low < auroc < high
        assert f"{target.majority:.2f}" in page
    assert "AUROC" in page
