"""Text of strangers made safe: for terminals, logs, pages and spreadsheets.

Names and messages come from sites, from data and from model files. A terminal obeys control sequences in them, letters
that change the direction of writing hide what stands there, and a spreadsheet runs cells that look like formulas.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")


def printable(text: str, keep: str = "") -> str:
    """``text`` with a space in place of every character that is not printed, except those to ``keep``.

    Example:
        >>> printable("north\\x1b[2J\\nsouth")
        'north [2J south'
        >>> printable("a\\tb\\nc", keep="\\n")
        'a b\\nc'
    """
    return "".join(letter if letter.isprintable() or letter in keep else " " for letter in text)


def type_in_words(dtype: Any) -> str:
    """The type of an array, in messages.

    Example:
        >>> import numpy
        >>> type_in_words(numpy.array(["1"]).dtype), type_in_words(numpy.zeros(1).dtype)
        ('text', 'float64')
    """
    return {"U": "text", "S": "text", "T": "text", "O": "Python objects"}.get(dtype.kind, str(dtype))


def one_line(text: str, most: int = 500) -> str:
    """A stranger's text as one line, cut to ``most`` characters."""
    text = printable(text[:most])
    return text if len(text) < most else f"{text[:-1]}…"


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that people can read and a terminal can show: characters that are not printed are written as escapes.

    Example:
        >>> json_text({"name": "größe\\x9b2J"})
        '{"name": "größe\\\\u009b2J"}'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)


def csv_cell(text: str) -> str:
    """``text`` as a cell that no spreadsheet takes for a formula: an apostrophe goes before it. Numbers stay.

    Example:
        >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell("fedavg")
        ("'=1+1", '-0.5', 'fedavg')
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def csv_text(rows: Iterable[Iterable[str]]) -> str:
    """Rows of cells as CSV that no spreadsheet runs."""
    text = io.StringIO()
    csv.writer(text).writerows(map(csv_cell, row) for row in rows)
    return text.getvalue()


def from_csv_cell(cell: str) -> str:
    """The inverse of `csv_cell`.

    Example:
        >>> from_csv_cell("'=1+1"), from_csv_cell("-0.5"), from_csv_cell("'tis")
        ('=1+1', '-0.5', "'tis")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def in_unit(value: float, like: float | None = None) -> str:
    """A number in the unit of a label: at least two decimals, and three digits that count.

    Args:
        like: a number that stands beside it, whose decimals it gets; None: its own.

    Example:
        >>> in_unit(1234.5), in_unit(0.00123456), in_unit(0.0), in_unit(0.00764, like=1.19)
        ('1234.50', '0.00123', '0.00', '0.01')
    """
    size = abs(value if like is None else like)
    decimals = 2 if not size or not math.isfinite(size) else max(2, 2 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def decimals(number: float, unit: str) -> str:
    """A number as tables have it: two decimals, or as `in_unit` where the unit is that of a label ("").

    Example:
        >>> decimals(70.126, "%"), decimals(0.0123456, "")
        ('70.13', '0.0123')
    """
    return f"{number:.2f}" if unit else in_unit(number)


def join_names(names: Sequence[str], most: int = 20, sign: str = ", ") -> str:
    """Names with commas or another sign between them; if they are many the first, and how many more.

    Example:
        >>> join_names(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    return sign.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def yaml_value(value: object) -> str:
    """A value as it is written in a YAML file.

    Example:
        >>> yaml_value("adam"), yaml_value(None), yaml_value((0.5, True))
        ('adam', 'none', '[0.5, true]')
    """
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(to_jsonable_python(value), ensure_ascii=False)


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


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours where there are any.

    Example:
        >>> clock(75), clock(3661)
        ('1:15', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size_in_words(number: float, bytes_as: str = "B") -> str:
    """Bytes, kB, MB, GB or TB.

    Example:
        >>> size_in_words(999), size_in_words(1500)
        ('999 B', '1.5 kB')
    """
    for unit in (bytes_as, "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == bytes_as else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
