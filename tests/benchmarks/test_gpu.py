"""`benchmarks/gpu.sh` with tiny numbers on the processor: every part runs, and says what it should say of a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
BASH = Path("/bin/bash")


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "FEDSHIFT_DATA"}
    command = [str(BASH), str(SCRIPT), sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )


@pytest.mark.slow
@pytest.mark.skipif(not BASH.exists(), reason="no bash")
def test_every_part_runs(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    said = started("--small", "--device", "cpu", "--output", output)
    assert said.returncode == 0, said.stderr
    found = json.loads(output.read_text())
    parts = found["parts"]
    assert not [row for rows in parts.values() for row in rows if "error" in row]
    assert all(row["equal"] for row in parts["bits"])
    assert {row["precision"] for row in parts["engine"]} == {"float32", "bf16"}
    assert all(0.05 < row["ratio"] < 20 for row in parts["engine"])
    assert [row["method"] for row in parts["methods"]] == ["fedavg", "csac", "kd3a"]
    assert (parts["pacs"][0].keys(), found["card"]) == ({"left_out"}, "cpu")
    assert not list(SCRIPT.parent.glob("results/gpu_cpu.json"))


@pytest.mark.slow
@pytest.mark.skipif(not BASH.exists(), reason="no bash")
def test_without_a_card() -> None:
    said = started()
    assert said.returncode == 1
    assert said.stderr.strip().splitlines()[-1].startswith("error: device")
    assert "Traceback" not in said.stderr
