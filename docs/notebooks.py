"""Makes the notebooks of examples/notebooks from the scripts beside them, whose cells begin with `# %%`.

    python docs/notebooks.py

Cells hold no outputs: these differ a little between processors. A line that begins with `# # %` is a comment of its
cell.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
CELL = re.compile(r"^# %%( \[markdown\])?$", flags=re.MULTILINE)


def notebook(script: str) -> str:
    """The notebook of a script, as JSON."""
    pieces = CELL.split(script)[1:]
    cells = []
    for number, (kind, body) in enumerate(zip(pieces[::2], pieces[1::2], strict=True)):
        text = body.strip("\n")
        if kind:
            cell = nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", text, flags=re.MULTILINE))
        else:
            cell = nbformat.v4.new_code_cell(re.sub(r"^# (?=# %)", "", text, flags=re.MULTILINE))
        cell.id = f"cell-{number}"  # the library's are drawn anew each time
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return f"{nbformat.writes(made)}\n"


def main() -> None:
    """Write every notebook beside its script."""
    for script in sorted(FOLDER.glob("*.py")):
        script.with_suffix(".ipynb").write_text(notebook(script.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
