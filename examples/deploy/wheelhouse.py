"""A folder of wheels for machines without a network: what requirements.lock pins, checked by its hashes, and fedshift.

    python examples/deploy/wheelhouse.py wheels --extras deploy,monitoring   # on a machine like theirs with a network
    pip install --no-index --find-links wheels --require-hashes -r wheels/requirements.lock   # on theirs

It takes the packages for this machine's system and Python. What is not in the lock, or has another hash, is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pip(*words: str) -> str:
    """What pip says; it ends this program where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"error: pip {words[0]} failed: see above")
    return ended.stdout


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(project: str, extras: str, lock: Path) -> list[str]:
    """The entries of the lock for what the project and its extras need here, each with its hashes."""
    entries = re.split(r"\n(?=[^\s#])", f"\n{lock.read_text(encoding='utf-8').strip()}")[1:]
    by_name = {plain(entry.split("==")[0]): entry for entry in entries}
    pins = lock.with_name("constraints.txt")
    words = [f"{project}[{extras}]" if extras else project, *(["-c", str(pins)] if pins.exists() else [])]
    report = json.loads(pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *words))
    own, *others = sorted(report["install"], key=lambda one: not one["requested"])
    names = [plain(one["metadata"]["name"]) for one in others]
    if missing := [name for name in names if name not in by_name]:
        raise SystemExit(f"error: {lock} lacks {', '.join(missing)}, which {own['metadata']['name']} needs here")
    return [by_name[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", default="report,deploy,monitoring", help="extras of fedshift; empty: none")
    parser.add_argument("--project", default=str(ROOT), help="fedshift's folder, or its wheel")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements.lock")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if any(asked.folder.glob("*.whl")):
        raise SystemExit(f"error: {asked.folder} holds wheels already: name a new folder")
    pinned, lock = asked.folder / "pinned.txt", asked.folder / "requirements.lock"
    pinned.write_text("\n".join([*needed(asked.project, asked.extras, asked.lock), ""]), encoding="utf-8")
    collect = ("wheel", "--quiet", "--no-deps", "-w", str(asked.folder))
    pip(*collect, "--require-hashes", "-r", str(pinned))  # what there is only as source is built
    pip(*collect, asked.project)
    wheels = sorted(asked.folder.glob("*.whl"))
    digests = {one: hashlib.sha256(one.read_bytes()).hexdigest() for one in wheels}
    pins = ["{}=={} --hash=sha256:{}".format(*one.name.split("-")[:2], digest) for one, digest in digests.items()]
    lock.write_text("\n".join([*pins, ""]), encoding="utf-8")
    print(f"{len(wheels)} wheels in {asked.folder}, {sum(one.stat().st_size for one in wheels) / 1e6:.0f} MB")
    print(f"pip install --no-index --find-links {asked.folder} --require-hashes -r {lock}")


if __name__ == "__main__":
    main()
