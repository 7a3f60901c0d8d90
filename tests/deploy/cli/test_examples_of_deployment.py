"""The systemd units and the container file of examples/deploy: what of them can be tried without either."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from calling import Cli

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "examples" / "deploy").glob("*.service"))
CONTAINERS = (ROOT / "Containerfile", ROOT / "examples" / "deploy" / "Containerfile")

pytestmark = pytest.mark.skipif(not UNITS, reason="examples/ is not beside these tests")


def command_of(text: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.M)
    return shlex.split(line)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the command systemd-analyze is not there")
    text = unit.read_text(encoding="utf-8")
    (tmp_path / unit.name).write_text(text.replace(command_of(text)[0], "/bin/true"), encoding="utf-8")
    said = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60
    )
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_one_of_ours(unit: Path, cli: Cli) -> None:
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")
    text = unit.read_text(encoding="utf-8")
    program, *words = command_of(text)
    assert Path(program).name == "fedshift"
    assert "/srv/fedshift" in cli(*words).error()  # understood, and there is no such kit here
    (writable,) = re.findall(r"^ReadWritePaths=(.*)$", text, flags=re.M)
    assert any(word.startswith(writable) for word in words)


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda file: file.parent.name)
def test_the_container_takes_the_package_and_nothing_that_lies_beside_it(file: Path) -> None:
    """Kits and data in the folder must not get into a layer, where deleting them later leaves them."""
    lines = file.read_text(encoding="utf-8").splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sorted(sources) == ["README.md", "constraints.txt", "pyproject.toml", "src"]
    assert all((ROOT / source).exists() for source in sources)
    assert lines.index("USER fedshift") > max(number for number, line in enumerate(lines) if line.startswith("RUN "))
