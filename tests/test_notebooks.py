"""The committed notebooks are what their scripts say, and their cells run one after the other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbformat")
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted((ROOT / "examples" / "notebooks").glob("*.py"))
SHORTER = {'"rounds": 40': '"rounds": 1', '"per_class": 45': '"per_class": 6', '"rounds": 15': '"rounds": 1'}


def converter() -> object:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_script_has_its_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in SCRIPTS]
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_what_its_script_says(script: Path) -> None:
    made = converter().notebook(script.read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    assert made == script.with_suffix(".ipynb").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_in_turn(path: Path, tmp_path: Path) -> None:
    """As a kernel runs them, with less training: each cell alone, the last line of it shown."""
    pytest.importorskip("pandas")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    for whole, less in SHORTER.items():
        code = code.replace(whole, less)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/*/*/seed-0/result.json"))
