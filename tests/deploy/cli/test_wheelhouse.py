"""A folder of wheels for a machine without a network: whole, checked by hashes, and installed without an index."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "deploy" / "wheelhouse.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT.exists(), reason="examples/ is not beside these tests"),
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not there"),
]


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A package that holds its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Provides-Extra: more\n" + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        lines = []
        for path, text in files.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(text)}\n")
        archive.writestr(f"{info}/RECORD", "".join([*lines, f"{info}/RECORD,,\n"]))
    return made


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Index:
    """A folder that pip takes packages from, a lock of it, and the project that needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels = folder, folder / "index"
        self.wheels.mkdir()
        entries = [
            ("needed_one", "1.0"),
            ("needed_one", "2.0"),
            ("needed_by_it", "1.5"),
            ("of_an_extra", "3.0"),
            ("of_others", "1.0"),
        ]
        made = {(name, version): wheel(self.wheels, name, version, *self.needs(name)) for name, version in entries}
        self.project = wheel(folder, "project", "0.1", "needed-one", "of-an-extra ; extra == 'more'")
        self.lock, pinned = folder / "requirements.lock", [entry for entry in entries if entry != ("needed_one", "2.0")]
        self.lock.write_text(
            "".join(
                f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{digest(made[name, version])}\n"
                for name, version in pinned
            )
        )
        (folder / "constraints.txt").write_text("".join(f"{name}=={version}\n" for name, version in pinned))

    @staticmethod
    def needs(name: str) -> list[str]:
        return ["needed-by-it"] if name == "needed_one" else []

    def run(self, *words: str, index: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels) if index else ""}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_CACHE_DIR": str(self.folder / "cache")}
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300)

    def collect(self, extras: str = "more") -> subprocess.CompletedProcess[str]:
        words = ("--project", str(self.project), "--lock", str(self.lock), "--extras", extras)
        return self.run(str(SCRIPT), str(self.folder / "house"), *words)

    def install(self, target: str) -> subprocess.CompletedProcess[str]:
        """As the script says, on a machine that has the folder alone."""
        house = self.folder / "house"
        words = ("--find-links", str(house), "--require-hashes", "-r", str(house / "requirements.lock"))
        target_folder = str(self.folder / target)
        return self.run("-m", "pip", "install", "--quiet", "--no-index", *words, "--target", target_folder, index=False)


@pytest.mark.threat("replaced_package")
def test_one_command_collects_what_is_pinned_and_another_installs_it(tmp_path: Path) -> None:
    index = Index(tmp_path)
    output = index.collect()
    assert output.returncode == 0, output.stderr
    assert "4 wheels" in output.stdout
    assert "--no-index" in output.stdout
    wheels = sorted(path.name.split("-")[0] for path in (tmp_path / "house").glob("*.whl"))
    assert wheels == ["needed_by_it", "needed_one", "of_an_extra", "project"]
    index.wheels.rename(tmp_path / "gone")
    output = index.install("there")
    assert output.returncode == 0, output.stderr
    assert "VERSION = '1.0'" in (tmp_path / "there" / "needed_one.py").read_text()
    assert (tmp_path / "there" / "of_an_extra.py").exists()
    wheel(tmp_path / "house", "needed_by_it", "1.5", "evil")  # somebody changed one on the way
    output = index.install("elsewhere")
    assert output.returncode != 0
    assert "HASHES" in output.stderr
    assert not (tmp_path / "elsewhere" / "needed_by_it.py").exists()


@pytest.mark.threat("replaced_package")
def test_what_an_index_changed_or_the_lock_lacks_is_refused(tmp_path: Path) -> None:
    index = Index(tmp_path)
    wheel(index.wheels, "needed_one", "1.0")
    output = index.collect("")
    assert output.returncode != 0
    assert "HASHES" in output.stderr or "hash" in output.stderr
    index.lock.write_text("".join(index.lock.read_text().splitlines(keepends=True)[4:]))
    wheel(index.wheels, "needed_one", "1.0", "needed-by-it")
    output = index.collect("")
    assert ((output.returncode, "lacks" in output.stderr), output.stderr.count("\n")) == ((1, True), 1)
