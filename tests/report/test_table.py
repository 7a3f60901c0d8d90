"""The table and its four forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fedshift.errors import UserError
from fedshift.report.collect import collect
from fedshift.report.report import report_of
from fedshift.report.table import table
from fedshift.report.table_formats import as_json, escape_latex, latex, markdown, terminal
from fedshift.report.table_picture import picture

Write = Callable[..., Path]

GOLDEN = """\
| method | M15 | M5 | average |
| --- | ---: | ---: | ---: |
| fedavg | 81.00 ± 1.00 | 72.00 ± 2.00 | 76.50 ± 1.50 |
| csac | 85.00 ± 1.00 | 75.00 | 79.50 |

Selection: last round.

Accuracy in percent, mean ± standard error over seeds (n−1), n = 2 seeds, except csac at M5 (1), csac at average (1).

5 of 12 runs unfinished.

Exchanges, and MB that all sites sent and got in a run: fedavg, csac 2 and 4.00.
"""


def printed(experiment: Path, width: int) -> str:
    console = Console(width=width, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal(report_of(collect(experiment)).table))
    return console.export_text()


def test_the_forms_of_the_table(experiment: Path) -> None:
    assert markdown(report_of(collect(experiment)).table) == GOLDEN
    found = json.loads(as_json(report_of(collect(experiment / "fedavg"), "oracle").table))
    assert found == [
        {"method": "fedavg", "target": "M15", "select": "oracle", "n": 2, "mean": 82.5, "standard_error": 1.0,
         "seeds": [81.5, 83.5]},
        {"method": "fedavg", "target": "M5", "select": "oracle", "n": 2, "mean": 73.5, "standard_error": 2.0,
         "seeds": [71.5, 75.5]},
        {"method": "fedavg", "target": "average", "select": "oracle", "n": 2, "mean": 78.0,
         "standard_error": pytest.approx(1.5), "seeds": [76.5, 79.5]},
    ]  # fmt: skip
    one_seed = json.loads(as_json(report_of(collect(experiment / "csac" / "M5")).table))
    assert one_seed[0]["standard_error"] is None
    assert list(one_seed[0]) == ["method", "target", "select", "n", "mean", "standard_error", "seeds"]
    text = latex(report_of(collect(experiment)).table)
    assert r"csac & 79.50 & 85.00 $\pm$ 1.00 & 75.00 \\" in text
    assert r"\label{tab:accuracy}" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    assert "±" not in text
    assert "held-out" in report_of(collect(experiment), "source").table.sentences[0]
    assert "upper bound" in report_of(collect(experiment), "oracle").table.sentences[0]
    results = collect(experiment).results
    assert table(reversed(results)).methods == ("csac", "fedavg")


@pytest.mark.threat("script_in_a_name")
def test_names_are_escaped(write_part: Write) -> None:
    folder = write_part("a|b_c & 5% [red]", "t_1", 0, 50.0)
    found = report_of(collect(folder.parents[2])).table
    assert r"a|b\_c \& 5\% [red] & 50.00 & 50.00 \\" in latex(found)
    assert r"| a\|b\_c & 5% \[red] | 50.00 | 50.00 |" in markdown(found)
    assert "[red]" in printed(folder.parents[2], 200)
    assert escape_latex("\\{}$#^~<>±") == (
        r"\textbackslash{}\{\}\$\#\textasciicircum{}\textasciitilde{}\textless{}\textgreater{}$\pm$"
    )


def test_missing_cell_and_an_average_that_cannot_be_compared(experiment: Path) -> None:
    (experiment / "csac" / "M5" / "seed-0" / "result.json").unlink()
    found = report_of(collect(experiment)).table
    assert found.cells["csac"]["M5"] is None
    lines = markdown(found).splitlines()
    assert lines[2] == "| fedavg | 81.00 ± 1.00 | 72.00 ± 2.00 | 76.50 ± 1.50 |"
    assert lines[3] == r"| csac | 85.00 ± 1.00 | – | 85.00\* ± 1.00 |"
    assert r"\* average over fewer than the table's 2 targets: not comparable." in markdown(found)
    assert "85.00*" in latex(found)
    assert r" & -- \\" in latex(found)
    assert "–" in printed(experiment, 100)


def test_runs_with_other_work_are_named(write_part: Write) -> None:
    for seed in range(3):
        write_part("fedavg", "t", seed, 50.0, mini_batches=80 if seed == 1 else 120)
        experiment = write_part("csac", "t", seed, 60.0, mini_batches=121).parents[2]
    (note,) = [line for line in report_of(collect(experiment)).table.sentences if "80" in line]
    assert "fedavg at t" in note
    assert "csac" not in note  # budgets are rounded up for every site
    assert note in markdown(report_of(collect(experiment)).table)


def test_bold_is_what_is_not_shown_to_be_worse_where_others_are(write_part: Write) -> None:
    """By hand: c is 30 below at every seed; a and b differ by chance."""
    for seed, noise in enumerate((0.0, 0.3, -0.3, 0.1)):
        for place in ("s", "t"):
            write_part("a", place, seed, 80.0 + noise)
            write_part("b", place, seed, 80.1 - noise)
            experiment = write_part("c", place, seed, 50.0).parents[2]
    found = report_of(collect(experiment)).table
    for column in ("s", "t", "average"):
        assert [name for name in found.methods if (cell := found.cells[name][column]) and cell.best] == ["a", "b"]
    assert "**" not in markdown(report_of(collect(experiment / "c")).table)


def test_nothing_is_bold_after_one_seed(write_part: Write) -> None:
    write_part("a", "t", 0, 80.0)
    experiment = write_part("b", "t", 0, 50.0).parents[2]
    assert "**" not in markdown(report_of(collect(experiment)).table)


def test_names_have_what_not_all_rows_used(write_part: Write) -> None:
    write_part("deepall", "t", 0, 50.0)
    experiment = write_part("fedavg", "t", 0, 50.0).parents[2]
    found = report_of(collect(experiment)).table
    assert "| deepall (pooled) |" in markdown(found)
    assert r"deepall (pooled) &" in latex(found)
    assert "deepall (pooled)" in printed(experiment, 100)
    assert {row["method"]: row["used"] for row in json.loads(as_json(found))} == {"deepall": ["pooled"], "fedavg": []}


def test_one_seed_says_so(write_part: Write) -> None:
    found = report_of(collect(write_part("a", "t", 3, 50.0))).table
    assert "n = 1 seed, so there is no standard error" in markdown(found)
    assert "±" not in markdown(found)


@pytest.mark.parametrize("width", [120, 46, 30])
def test_no_number_is_cut_on_a_narrow_screen(experiment: Path, width: int) -> None:
    text = printed(experiment, width)
    for number in ("81.00", "±1.00", "72.00", "±2.00", "76.50", "±1.50", "85.00", "75.00", "79.50"):
        assert number in text
    assert "5 of 12 runs unfinished" in text
    assert max(map(len, text.splitlines())) <= width


def test_source_selection_without_held_out_parts(write_part: Write) -> None:
    folder = write_part("a", "t", 0, 50.0, held_out=False)
    with pytest.raises(UserError, match="test_fraction"):
        report_of(collect(folder), "source")


def test_picture_is_a_file_of_its_own(write_part: Write) -> None:
    experiment = write_part("deepall", "left", 0, 90.0).parents[2]
    write_part("fedavg", "left", 0, 80.0)
    drawn = picture(report_of(collect(experiment)))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in ElementTree.fromstring(drawn).iter(f"{svg}text")]
    assert {"fedavg", "deepall (pooled, not private)", "left", "average"} <= set(texts)
    colors = re.findall(r"var\(--(\w+)\)", drawn)
    assert colors
    assert all(drawn.count(f"--{name}:") == 2 for name in colors)  # for light and for dark screens
    assert not re.search(r"(href|src)=.http", drawn)
