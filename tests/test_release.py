"""What a release is made of: the files that the package holds, its version, the workflows that publish it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedshift

release_address = pytest.importorskip("release_address", reason="docs/ is not beside these tests")

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedshift"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(
    not PACKAGE.is_dir() or not WORKFLOWS, reason="the repository is not around these tests"
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_has_every_file_of_the_package() -> None:
    """As setuptools lists them: modules of folders with ``__init__.py``, and what package-data names."""
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    modules = {path for path in files if path.suffix == ".py" and (path.parent / "__init__.py").exists()}
    data = {
        path
        for pattern in project()["tool"]["setuptools"]["package-data"]["fedshift"]
        for path in PACKAGE.glob(pattern)
    }
    assert sorted(map(str, files - modules - data)) == []
    assert {"demo.yaml", "try.yaml", "py.typed"} <= {path.name for path in data}
    for path in modules:
        assert all((folder / "__init__.py").exists() for folder in path.parents if PACKAGE in (folder, *folder.parents))


def test_the_version_is_that_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.2.3 of {name}")
    assert fedshift.__version__ == "1.2.3 of fedshift"

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert "unknown" in fedshift.__version__


def test_versions_and_badges_say_what_the_package_says() -> None:
    first = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert first
    assert project()["tool"]["setuptools_scm"]["fallback_version"] in (first[1], f"{first[1]}.dev0")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == first[1]
    metadata = project()["project"]
    versions = [line.split()[-1] for line in metadata["classifiers"] if re.search(r":: 3\.\d+$", line)]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"badge/python-([\d.]+)_to_([\d.]+)-", text) == [(versions[0], versions[-1])]
    assert metadata["license"].replace("-", "--") in text
    assert metadata["requires-python"] == f">={versions[0]}"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_runs_exists(file: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    extras = project()["project"]["optional-dependencies"]
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    text = file.read_text(encoding="utf-8")
    for target in re.findall(r"run: make ([\w-]+)", text):
        assert target in targets, target
    for names in re.findall(r" -e \.\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(extras)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}).get("id-token") != "write" or name == "publish"


def test_what_is_published_was_built_and_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert "tag" in jobs["publish"]["if"]
    assert any('fedshift" demo' in step.get("run", "") for step in jobs["build"]["steps"])


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    metadata = project()["project"]
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    needs = [*metadata["dependencies"], *metadata["optional-dependencies"]["report"]]
    pairs = [re.fullmatch(r"([\w-]+)(>=\S+)", need) for need in needs]
    wanted = [f"{names.get(pair[1], pair[1])} {pair[2]}" for pair in pairs if pair]
    assert len(wanted) == len(needs)
    assert recipe["requirements"]["run"] == [f"python {metadata['requires-python']}", *wanted]
    build = [f"{name} {least}" for name, least in (need.split(">=") for need in project()["build-system"]["requires"])]
    assert {*(line.replace(">=", "") for line in recipe["requirements"]["host"])} >= set(build)
    version = project()["tool"]["setuptools_scm"]["fallback_version"]
    assert (recipe["context"]["version"], recipe["about"]["license"]) == (version, metadata["license"])
    entry = f"fedshift = {metadata['scripts']['fedshift']}"
    assert recipe["build"]["python"]["entry_points"] == [entry]


def test_a_release_says_where_its_repository_is(tmp_path: Path) -> None:
    """The index shows the README without the files beside it."""
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    address = "https://example.org/owner/fedshift"
    release_address.write_address(tmp_path, address, "v1.2.3")
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    links = re.findall(r"\]\((\S+?)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert all(link.startswith("https://") for link in links)
    files = [link.removeprefix(address) for link in (*urls.values(), *links) if "v1.2.3" in link]
    assert len(files) > len(urls)
    for file in files:
        view, name = re.fullmatch(r"/(blob|raw)/v1\.2\.3/([^#]+)(?:#.*)?", file).groups()  # type: ignore[union-attr]
        assert (ROOT / name).exists()
        assert (view == "raw") == name.endswith(".svg")
    commands = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert commands.index("docs/release_address.py") < commands.index("python -m build")
