"""How sphinx-gallery runs the scripts of examples/python, and the picture that each one gets."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

FIRST = ("your_table.py", "reading_results.py")
"""The second one reads what the first one wrote."""


def example_order(name: str) -> tuple[int, str]:
    """The place of a script: those of `FIRST`, then the others by name."""
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def titled(script: str) -> str:
    """A script whose docstring starts with a title, as sphinx-gallery needs it: what stands before the first colon."""
    first, _, rest = script.removeprefix('"""').partition('"""')
    title, _, text = first.partition(":")
    if not text:
        title, _, text = first.partition(".")
    text = text.strip()
    return f'"""\n{title.strip()}\n{"=" * len(title.strip())}\n\n{text[:1].upper()}{text[1:]}\n"""{rest}'


def draw_results(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """A picture of the ``results`` that a script has made: what each method reaches at each target."""
    from sphinx_gallery.scrapers import figure_rst

    from fedshift.report.plots import accuracy_per_target
    from fedshift.report.report import report_of

    results = block_vars["example_globals"].get("results")
    if results is None:
        return ""
    path = next(iter(block_vars["image_path_iterator"]))
    figure = accuracy_per_target(report_of(results.collected).table)
    figure.set_size_inches(6.0, 3.6)  # points and names stay visible in the gallery's small picture
    figure.savefig(path, dpi=100)
    return str(figure_rst([path], gallery_conf["src_dir"], "The measure of each method at each target"))


def around_script(gallery_conf: dict[str, Any], name: str) -> None:
    """Called before and after each script.

    It tells the script its own path, by which these find data, as sphinx-gallery runs them without ``__file__``. And it
    removes the folders of exported models, whose README.md would make a section of the gallery.
    """
    folder = Path(gallery_conf["src_dir"]) / "examples" / "python"
    vars(builtins)["__file__"] = str(folder / Path(name).name)
    for exported in folder.glob("exported*"):
        shutil.rmtree(exported)
