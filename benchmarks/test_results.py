"""The benchmarks' committed results are whole, and the committed commands make them anew: ``make check-results``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import belongs
import chart
import claims
import peers
import summarise
from fedshift.evaluation.stored import SETTINGS, is_finished, read_stored, run_folders
from fedshift.experiment.runs.run_identity import comparable
from fedshift.files import plain_yaml
from fedshift.methods.index import ENTRIES
from paper_tables.catalogue import Entry, read
from paper_tables.comparison import Runs, compare_panel
from paper_tables.panels import panels_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "benchmarks").glob("*.md"))
COMMANDS = (ROOT / "benchmarks" / "commands.sh").read_text(encoding="utf-8")
PAPERS = read(ROOT / "benchmarks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_can_be_made_again(page: Path) -> None:
    """Every table has committed results, and every page the commands that made them."""
    text = page.read_text(encoding="utf-8")
    names = {*re.findall(r"^<!-- table (\S+)", text, flags=re.M), *summarise.printed_results(text)}
    for name in names:
        assert any(map(is_finished, run_folders(RESULTS / name))), name
    assert page.name == "README.md" or f"\n# {page.name}\n" in COMMANDS, page.name
    assert "(commands.sh)" in text, page.name


def test_commands_parse_as_they_stand_and_their_results_are_committed() -> None:
    described = list(belongs.commands())
    assert len(described) > 80
    for command, experiment in described:
        assert (RESULTS / experiment.name).is_dir(), command


def test_tables_are_those_that_the_results_give() -> None:
    other = [page.name for page in summarise.PAGES if summarise.fill_page(page) != page.read_text(encoding="utf-8")]
    assert other == [], "run python benchmarks/summarise.py"


def test_what_a_page_leaves_out_can_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["summarise.py", "five_digits"])
    summarise.main()
    assert "| shot − fedavg |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["summarise.py", "five_digit"])
    with pytest.raises(SystemExit, match="did you mean"):
        summarise.main()


@pytest.fixture(scope="module")
def filled_tables() -> str:
    """Every table of the results: on the pages, and what the pages leave out."""
    texts = [text for page in PAGES for text in re.findall(r"<!-- table .*?<!-- end -->", page.read_text(), re.DOTALL)]
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = {*(match[0] for match in summarise.MARKER.findall(pages)), *summarise.printed_results(pages)}
    return "\n".join([*texts, *map(summarise.more, sorted(names))]).replace("-", "−").replace("\\", "")


def numbers_of(advice: str) -> list[str]:
    """Those with two decimals; claims.yaml holds every p."""
    return re.findall(r"\d+\.\d\d+", re.sub(r"\bp( here)? [=<] [\d.]+", "", advice))


def test_the_numbers_of_an_advice_stand_in_tables_of_the_results(filled_tables: str) -> None:
    numbers = {number for entry in ENTRIES.values() for number in numbers_of(entry.advice)}
    assert len(numbers) > 30
    assert sorted(number for number in numbers if not stands_in(number, filled_tables)) == []


def test_the_first_number_of_an_advice_stands_in_a_row_of_the_method(filled_tables: str) -> None:
    """A number can stand in some other method's row by chance, after the row that it came from is gone."""
    rows = filled_tables.splitlines()
    absent = []
    for method, entry in ENTRIES.items():
        of_method = [row for row in rows if re.match(rf"\| {method}\b", row)]
        absent += [
            (method, first)
            for first in numbers_of(entry.advice)[:1]
            if not any(stands_in(first, row) for row in of_method)
        ]
    assert absent == []


def stands_in(number: str, text: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text) is not None


CLAIMS = claims.claims()


def test_every_claim_has_the_numbers_of_the_committed_results() -> None:
    assert len(CLAIMS) > 50
    assert [str(claim) for claim in CLAIMS if claims.recompute(claim) != claim] == []
    assert all((ROOT / page).is_file() for claim in CLAIMS for page in claim.page)


@pytest.mark.parametrize("page", claims.PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_p_in_a_sentence_is_that_of_the_gain_beside_it(page: Path) -> None:
    assert claims.p_values_without_claim(page, CLAIMS) == [], "add the comparison to claims.yaml, or mend the sentence"


def test_a_wrong_p_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claim = CLAIMS[0].model_copy(update={"page": ("page.md",), "gain": 5.46, "p": "0.073", "here": "0.005"})
    page = tmp_path / "page.md"
    for text, wrong in {
        "5.5 above FedAvg (p = 0.073), here too (p here = 0.005)": 0,
        "+5.46 (p = 0.005)": 1,
        "+5.46 (p here = 0.073)": 1,
        "+5.47 (p = 0.073)": 1,
        "no gain, p = 0.073": 1,
        "at p < 0.05": 0,
        "+5.46 (p < 0.001)": 1,
    }.items():
        page.write_text(text, encoding="utf-8")
        assert len(claims.p_values_without_claim(page, [claim])) == wrong, text
    for change in ({"gain": 5.0}, {"p": "0.001"}, {"here": "–"}):
        assert claims.recompute(CLAIMS[0].model_copy(update=change)) == CLAIMS[0]


def test_chart_shows_the_averages_of_the_tables() -> None:
    drawn = (ROOT / "benchmarks" / "rotated_mnist.svg").read_text(encoding="utf-8")
    rows = [row for panel in chart.PANELS for row in chart.averages(panel).items()]
    assert len(rows) > 10
    for name, (mean, _) in rows:
        assert f">{name}<" in drawn, "run python benchmarks/chart.py"
        assert f">{mean:.2f}<" in drawn, "run python benchmarks/chart.py"


@pytest.mark.parametrize("entry", PAPERS.entries, ids=lambda entry: entry.name)
def test_a_papers_entry_finds_its_numbers(entry: Entry) -> None:
    """Every cell of an entry that has finished runs has a number of ours, and the entry can be drawn."""
    states = [PAPERS.state(source) for source in entry.experiments]
    if not states or not all(state.finished for state in states):
        return
    runs = Runs(PAPERS, entry)
    for panel in entry.panels:
        if panel.kind == "cells":
            columns = [name for name, source in panel.columns.items() if source.experiment != "none"]
            numbers = compare_panel(PAPERS, panel, runs)
            assert set(numbers.ours) == {(row, column) for row in panel.rows for column in columns}
    assert panels_of(PAPERS, entry)


def test_committed_results_are_whole_and_still_understood() -> None:
    folders = [folder for folder in run_folders(RESULTS) if folder.name == "seed-0"]
    assert folders
    for folder in folders:
        file = read_stored(folder / SETTINGS)
        assert file is not None
        settings = plain_yaml(file.data)
        assert set(settings) <= set(comparable(settings)) | {"engine", "device", "versions"}
        assert comparable(comparable(settings)) == comparable(settings)


@pytest.mark.parametrize(("name", "steps"), [("angles", 300), ("clients", peers.STEPS_OF_A_CLIENT)])
def test_the_page_has_what_was_measured_beside_the_peers(name: str, steps: int) -> None:
    """A row that it leaves out is level with the peer's, or has none beside it."""
    page = (peers.HERE / "peers.md").read_text(encoding="utf-8")
    rows = peers.table(name, steps)
    shown = [row for row in rows if row in page]
    assert len(shown) >= 5
    for row in set(rows) - set(shown):
        difference = re.search(r"\| ([-+][\d.]+) \(([-+][\d.]+)\) \|$", row)
        assert difference is None or abs(float(difference[1])) <= 1.0, row
        assert difference is None or abs(float(difference[2])) <= 2.3, row
