"""What fedshift is installed from: hashed pins, a list of what is installed, a workflow that looks for known flaws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from audit_lock import failures

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
pytestmark = pytest.mark.skipif(not LOCK.is_file(), reason="requirements.lock is not beside these tests")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[set[str], list[str]]]:
    """Package → versions (one per platform at most) and hashes of its files."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for entry in re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8").strip()):
        name, pinned = re.match(r"([\w.-]+)==([^\s;\\]+)", entry).groups()  # type: ignore[union-attr]
        versions, hashes = found.setdefault(plain(name), (set(), []))
        versions.add(pinned)
        own = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)
        assert own, f"{name} has no hash"
        hashes += own
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {plain(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


@pytest.mark.threat("replaced_package")
def test_whatever_fedshift_needs_is_pinned_and_locked_by_hashes() -> None:
    lock = locked()
    assert {name: pinned for name, pinned in pins().items() if lock.get(name, ({}, []))[0] != {pinned}} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    for need in needs:
        name = plain(re.match(r"[\w.-]+", need)[0])  # type: ignore[index]
        assert name in pins(), name
        assert name in locked(), name


@pytest.mark.threat("replaced_package")
def test_the_workflow_runs_what_make_offers() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\naudit:")[2].partition("\n\n")[0]
    assert "make audit" in steps
    assert "make sbom" in steps
    assert any("--require-hashes --requirement requirements.lock" in step for step in steps)
    assert "bandit" in recipe
    assert "tests/audit_lock.py" in recipe
    for step in steps:
        for file in re.findall(r"tests/\S+\.py", step):
            assert (ROOT / file).is_file(), file


CLEAN: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
SKIPPED = [{"name": name, "skip_reason": "not found"} for name in ("absl-py", "accelerate")]


@pytest.mark.case("audit of packages", "an index without advisories, which skips all of them")
@pytest.mark.case("audit of packages", "one that was not looked up beside others that were")
@pytest.mark.case("audit of packages", "a stated exception, and one that is none any more")
def test_what_was_not_looked_up_is_a_failure() -> None:
    (line,) = failures(SKIPPED)
    assert "2 of 2 packages were not looked up" in line
    assert "no advisories" in line
    (line,) = failures([CLEAN, *SKIPPED], {"absl-py": "a reason"})
    assert line == "1 of 3 packages were not looked up: accelerate"
    assert failures([CLEAN, *SKIPPED], dict.fromkeys(("absl-py", "accelerate"), "a reason")) == []
    (line,) = failures([CLEAN], {"a": "a reason"})
    assert "a is no exception" in line
    assert failures([]) == ["no package was looked up"]
    assert failures([CLEAN]) == []
    flaw = {"id": "CVE-1", "fix_versions": ["3"]}
    assert failures([CLEAN, {"name": "b", "version": "2", "vulns": [flaw]}]) == ["b 2: CVE-1, mended in 3"]


@pytest.mark.threat("unseen_package")
@pytest.mark.slow
def test_the_list_of_what_is_installed_is_whole(tmp_path: Path) -> None:
    """CycloneDX 1.6: the fields that its schema requires, and each package with its version.

    The recipe compares the list with the whole schema, too, which takes longer than all else and is left to it.
    """
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed: pip install -e '.[dev]'")
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nsbom:")[2].partition("\n\n")[0]
    options = recipe.split(" environment $(BIN)/python ")[1].replace("sbom.json", str(tmp_path / "sbom.json")).split()
    options[options.index("--pyproject") + 1] = str(ROOT / "pyproject.toml")
    options[options.index("--validate")] = "--no-validate"
    subprocess.run([sys.executable, "-m", "cyclonedx_py", "environment", sys.executable, *options], check=True)
    found: dict[str, Any] = json.loads((tmp_path / "sbom.json").read_text())
    assert found["bomFormat"] == "CycloneDX"
    assert found["specVersion"] == "1.6"
    assert found["metadata"]["component"]["name"] == "fedshift"
    parts = found["components"]
    for part in parts:
        assert part["type"] in ("library", "application", "framework")
        assert part["name"]
        assert part["version"]
    references = [part["bom-ref"] for part in parts]
    assert len(references) == len(set(references))
    listed = {plain(part["name"]): part["version"] for part in parts}
    for name in ("torch", "numpy", "safetensors", "pydantic"):
        assert listed[name] == version(name)
