"""Text of strangers: what reaches a terminal, a page or a spreadsheet obeys nobody."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.text import csv_cell, from_csv_cell, json_text, one_line, printable

NASTY = "\x1b[2J\x1b]0;title\x07\r\n\t\x9b31m\u202e\u2028\x00\ud800"


def test_nothing_of_a_control_sequence_is_left() -> None:
    for text in (printable(NASTY), one_line(NASTY), json_text({NASTY: [NASTY]})):
        assert text.isprintable()
    assert printable("größe – 北 é") == "größe – 北 é"
    assert one_line("x" * 600) == "x" * 499 + "…"


NESTED = st.recursive(
    st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@settings(max_examples=100)
@given(NESTED)
def test_json_stays_the_same_value(value: object) -> None:
    assert json.loads(json_text(value)) == value


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=", "-", "'=1", "-1_0", "+1e"])
def test_formulas_are_escaped(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["-0.5", "+3", "-1e-5", "-.5", "-7.", "-inf", "12", "", "north", "'tis", "a=b", "≤ 3"])
def test_numbers_and_words_stay(text: str) -> None:
    assert csv_cell(text) == text == from_csv_cell(text)


@settings(max_examples=100)
@given(st.text(alphabet="'=+-@\t\r1.e a"))
def test_cells_read_back_as_they_were(text: str) -> None:
    assert from_csv_cell(csv_cell(text)) == text
    file = io.StringIO()
    csv.writer(file).writerow([csv_cell(text)])
    (cell,) = next(csv.reader(io.StringIO(file.getvalue(), newline=""))) or [""]
    assert cell[:1] not in ("=", "@", "\t", "\r")
