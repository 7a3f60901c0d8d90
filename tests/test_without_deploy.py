"""The library where `fedshift.deploy` is not installed: it trains, tells and watches, and lacks only the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedshift

pytestmark = pytest.mark.slow
HIDDEN = 'import sys; sys.modules["fedshift.deploy"] = None; '
EXPERIMENT = """\
name: small
data: {name: rotated_digits, per_class: 5}
protocol: {targets: [D0], seeds: [0]}
model: mnist_cnn
training: {rounds: 1, batch_size: 16}
methods: [fedavg]
"""


def without(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What Python does in a process that finds no `fedshift.deploy`."""
    source = str(Path(fedshift.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", HIDDEN + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def command(*words: str) -> str:
    return f"sys.argv = {['fedshift', *words]!r}; from fedshift.cli import main; main()"


def test_every_module_of_the_library_can_be_imported(tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, fedshift\n"
        "names = [m.name for m in pkgutil.walk_packages(fedshift.__path__, 'fedshift.', onerror=lambda name: None)]\n"
        "names = [n for n in names if not n.startswith('fedshift.deploy.') and not n.endswith('__main__')]\n"
        "[importlib.import_module(n) for n in names if n != 'fedshift.deploy']\n"
        "print(len(names), sum(n.startswith('fedshift.deploy.') for n in sys.modules))"
    )
    done = without(code, tmp_path)
    assert done.returncode == 0, done.stderr
    number, of_deploy = map(int, done.stdout.split())
    assert number > 300
    assert of_deploy == 0


def test_experiments_are_run_told_and_watched(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    ran = without(command("run", "small.yaml"), tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "fedavg" in without(command("table", "runs/small", "--format", "markdown"), tmp_path).stdout
    page = "import pathlib, fedshift.report.watch.live_page as watch; print(watch.watch_page(pathlib.Path('runs')))"
    assert "1 of 1 runs finished" in without(page, tmp_path).stdout


def test_only_the_commands_of_deployments_are_missing(tmp_path: Path) -> None:
    told = without(command("--help"), tmp_path).stdout
    assert " run " in told
    assert " project " not in told
    lost = without(command("deploy", "small.yaml"), tmp_path)
    assert lost.returncode == 2
    assert "No such command 'deploy'" in lost.stderr
