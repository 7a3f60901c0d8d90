"""Markdown and LaTeX of tables: text with the special characters escaped, and rows of cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedshift.text import printable


def escape_markdown(text: str) -> str:
    """``text`` with Markdown's special characters escaped.

    Example:
        >>> escape_markdown("csac_v1 | <b>")
        'csac\\\\_v1 \\\\| \\\\<b>'
    """
    return "".join(f"\\{letter}" if letter in "\\|*_`<[" else letter for letter in printable(text))


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---:") -> str:
    """A Markdown table of cells that are escaped already.

    Args:
        head: the columns' headings.
        rows: the cells.
        rule: what stands below every heading but the first; ``---:`` sets numbers to the right.

    Example:
        >>> print(pipes(["method", "a"], [["fedavg", "70.00"]]))
        | method | a |
        | --- | ---: |
        | fedavg | 70.00 |
    """
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *(rule for _ in head[1:])], *rows))


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    **{letter: "\\" + letter for letter in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    """``text`` with LaTeX's special characters escaped.

    Example:
        >>> escape_latex("csac_v1 & 50%")
        'csac\\\\_v1 \\\\& 50\\\\%'
    """
    return "".join(_LATEX.get(letter, letter) for letter in printable(text))
