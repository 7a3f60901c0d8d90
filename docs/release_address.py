"""Write the repository's address into ``pyproject.toml`` and ``README.md``, for a release.

    python docs/release_address.py https://github.com/owner/fedshift v1.2.3

No address stands in this repository, so that a fork's package does not point at another's. The release workflow knows
its own: it adds ``[project.urls]``, and makes the README's links whole, which the package index shows without the
files beside it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGES = {"Documentation": "docs/python.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
"""What the package index links beside the repository and its issues."""


def urls_table(address: str, revision: str) -> str:
    """``[project.urls]`` as TOML."""
    files = {title: f"{address}/blob/{revision}/{path}" for title, path in PAGES.items()}
    urls = {"Homepage": address, "Issues": f"{address}/issues", **files}
    return "[project.urls]\n" + "".join(f'{title} = "{url}"\n' for title, url in urls.items())


def make_links_whole(text: str, address: str, revision: str) -> str:
    """The README's text, with every link and picture of a file beside it at its whole address."""

    def whole(link: re.Match[str]) -> str:
        view = "raw" if link[1] == "!" else "blob"
        return f"{link[1]}{link[2]}({address}/{view}/{revision}/{link[3]})"

    return re.sub(r"(!?)(\[[^]]*\])\((?!\w+:|#)([^)\s]+)\)", whole, text)


def write_address(root: Path, address: str, revision: str) -> None:
    """Change both files of the copy in ``root``."""
    project, readme = root / "pyproject.toml", root / "README.md"
    table = f"{urls_table(address, revision)}\n[project.scripts]"
    project.write_text(project.read_text(encoding="utf-8").replace("[project.scripts]", table), encoding="utf-8")
    readme.write_text(make_links_whole(readme.read_text(encoding="utf-8"), address, revision), encoding="utf-8")


if __name__ == "__main__":
    write_address(Path(__file__).resolve().parents[1], sys.argv[1].removesuffix("/"), sys.argv[2])
