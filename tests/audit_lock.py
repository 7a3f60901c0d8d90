"""Known flaws in the packages of requirements.lock. A package that could not be looked up is a failure, too.

    python tests/audit_lock.py

It asks the package index by pip-audit. An index without advisories, such as a mirror, knows nothing of any package:
pip-audit then finds no flaw, or with ``--strict`` names the first package alone, as if the fault were that package's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
EXCEPTIONS: Mapping[str, str] = {}
"""Packages that need not be looked up, and why. One that can be looked up, or is not pinned, is no exception."""


def audited() -> list[dict[str, Any]]:
    """What pip-audit says of each package that is pinned for this platform.

    Raises:
        SystemExit: it says nothing.
    """
    options = ("--requirement", str(LOCK), "--require-hashes", "--disable-pip", "--format", "json")
    ended = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(ended.stderr.strip() or "pip-audit said nothing") from None
    return packages


def failures(packages: Sequence[Mapping[str, Any]], exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """One line for each failure: a flaw that is known, packages that were not looked up, an exception that is none."""
    flaws = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    unknown = {package["name"] for package in packages if "vulns" not in package}
    lines = flaws + [f"{name} is no exception: it was looked up, or is not pinned" for name in {*exceptions} - unknown]
    if missed := sorted(unknown - {*exceptions}):
        why = ": the package index has no advisories; ask one that has (PyPI)" if len(missed) == len(packages) else ""
        named = ", ".join(missed[:10]) + (" …" if len(missed) > 10 else "")
        lines.append(f"{len(missed)} of {len(packages)} packages were not looked up{why}: {named}")
    return lines if packages else ["no package was looked up"]


def main() -> None:
    packages = audited()
    for name, why in EXCEPTIONS.items():
        print(f"exception: {name}: {why}")
    if lines := failures(packages):
        raise SystemExit("\n".join(lines))
    print(f"{len(packages) - len(EXCEPTIONS)} packages were looked up: no flaw is known")


if __name__ == "__main__":
    main()
