"""Lays out the pages of the documentation site: ``python docs/site/assemble.py FOLDER``.

The folder then has what Sphinx reads: the pages of docs/ and benchmarks/ at the places where their links expect them,
the site's own pages, and those made from the code: methods, data sets, networks, commands, experiment files.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import list_methods
import list_threats
import measured
import reference
from gallery import titled

import summarise
from fedshift.data import registry as datasets
from fedshift.methods.index import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).parent / "pages"
REFERENCES = ROOT / "tests" / "references" / "README.md"
AT_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
SITE = re.compile(r"<!-- site (\w+) -->")
MADE: dict[str, Callable[[], str]] = {
    "threats": list_threats.tables,
    "methods": list_methods.by_group,
    "secure_sums": lambda: docstring("deploy/secure/__init__.py"),
    "sealed_models": lambda: docstring("deploy/secure/site_seals.py"),
    "flare": lambda: docstring("deploy/flare/__init__.py"),
}
"""What stands on a page of the site where the committed page has only a mark."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def assemble(out: Path) -> None:
    """Write every page below ``out``, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(OWN, out)
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), REFERENCES]
    pages += [ROOT / name for name in AT_THE_ROOT]
    for page in pages:
        _write(out / page.relative_to(ROOT), whole(page, with_links(page, set(pages))))
    for picture in (ROOT / "benchmarks").glob("*.png"):
        shutil.copy(picture, out / "benchmarks")
    for picture in (ROOT / "docs").glob("*.svg"):
        _write(out / "docs" / picture.name, in_light_colours(picture.read_text(encoding="utf-8")))
    _examples(out)
    results = measured.read(ROOT / "benchmarks")
    for name in ENTRIES:
        _write(out / "methods" / f"{name}.md", reference.method_page(name, results.get(name, "")))
    _write(out / "methods" / "index.md", reference.methods_index())
    for name in datasets.names():
        _write(out / "datasets" / f"{name}.md", reference.dataset_page(name))
    _write(out / "datasets" / "index.md", reference.datasets_index())
    _write(out / "reference" / "command_line.md", reference.command_line())
    _write(out / "reference" / "experiment_file.md", reference.experiment_file())
    _write(out / "reference" / "networks.md", reference.networks())
    _write(out / "reference" / "functional.md", reference.functional())


def whole(page: Path, text: str) -> str:
    """A page with what is not committed: tables at its marks, and all of the results that a page of results names."""
    text = SITE.sub(lambda mark: MADE[mark[1]](), text)
    if page.parent.name != "benchmarks":
        return text
    names = sorted({*(match[0] for match in summarise.MARKER.findall(text)), *summarise.printed_results(text)})
    parts = [f"### {name}\n\n{summarise.more(name)}" for name in names if summarise.has_runs(name)]
    return "\n\n".join([text.rstrip(), *(["## All numbers", *parts] if parts else [])])


def docstring(module: str) -> str:
    """What stands at the head of a module, below its first sentence: Markdown."""
    text = ast.get_docstring(ast.parse((ROOT / "src" / "fedshift" / module).read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[2]


def in_light_colours(svg: str) -> str:
    """A drawing of fedshift without its dark colours, which follow the system's and not the page's choice."""
    return re.sub(r"@media screen and \(prefers-color-scheme:dark\)\{:root\{[^}]*\}\}", "", svg)


def with_links(page: Path, pages: Iterable[Path]) -> str:
    """The text of a page. A link to a file that is no page of the site becomes the file's name.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """

    def replaced(link: re.Match[str]) -> str:
        text, place = link[1], link[2]
        if "://" in place:
            return link[0]
        target = (page.parent / place).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{page.name} links to {place}")
        if target in pages:
            return link[0]
        name = target.relative_to(ROOT).as_posix()
        return f"{text} (`{name}`)" if text.strip("`") not in (name, target.name) else f"`{name}`"

    parts = re.split(r"(^```.*?^```)", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def _examples(out: Path) -> None:
    shutil.copytree(ROOT / "examples", out / "examples")
    scripts = out / "examples" / "python"
    for script in scripts.glob("*.py"):
        script.write_text(titled(script.read_text(encoding="utf-8")), encoding="utf-8")
    (scripts / "GALLERY_HEADER.rst").write_text(
        "Gallery\n=======\n\nEach script runs as it stands: ``python examples/python/your_table.py``. Two need more, "
        "which they name at their top: the files of a data set, or the extra ``deploy``. Here they are not run.\n",
        encoding="utf-8",
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
