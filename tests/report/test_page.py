"""The HTML page: well-formed, self-contained, whole or absent."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedshift.errors import UserError
from fedshift.report import plots
from fedshift.report.collect import collect
from fedshift.report.page import page, write_page
from fedshift.report.plots import accuracy_over_rounds, bytes_by_kind, svg
from fedshift.report.report import whole_report
from tried import slow

Write = Callable[..., Path]

VOID = {"meta", "br", "hr", "img", "link"}


class Balanced(HTMLParser):
    """Checks that every element is closed in order and collects the addresses that the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_whole_quiet_and_says_what_it_must(experiment: Path) -> None:
    text = page(whole_report(collect(experiment)))
    assert all(address.startswith(("#", "data:text/csv")) for address in parsed(text).fetched)
    assert "://" not in text
    assert "url(" not in text.replace("url(#", "")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy, "the browser refuses every request"
    assert f"script-src 'sha256-{digest}'" in policy, "and every script but this one"
    for piece in (
        "<h1>exp</h1>", "Does it work at a new site?", "5 of 12 runs unfinished", "85.00", "upper bound",
        "Accuracy over rounds", "Megabytes per run", "csac − fedavg", "torch", "made up", "&lt;dog&gt;", "How to read",
    ):  # fmt: skip
        assert piece in text, piece
    # csac is 4 better at M15 for both seeds and 5 better at M5 for one, which alone has both targets.
    missing = '<td class="missing">–</td>'
    assert f"<td>+4.50</td>{4 * missing}<td>1</td>{missing}" in text
    assert text.index('id="result"') < text.index('id="others"')
    headline = text[text.index('id="result"') : text.index('id="curves"')]
    assert "last round" in headline
    assert "82.50" not in headline  # fedavg's oracle accuracy at M15
    assert page(whole_report(collect(experiment))) == text


@pytest.mark.threat("script_in_a_name")
def test_names_cannot_break_out(write_part: Write) -> None:
    folder = write_part("<b>&\"'", "t", 0, 50.0, warnings=["<script>alert(1)</script>"])
    text = page(whole_report(collect(folder.parents[2])))
    parsed(text)
    assert text.count("<script") == 1, "its own"
    assert "&lt;script&gt;" in text


@pytest.mark.threat("control_text")
@pytest.mark.filterwarnings("error")  # of a letter that no font has, which would reach the terminal
@pytest.mark.parametrize("name", ["a $ and b $", *map(slow, ["$^$", "$\\frac$", "one $", "a\x1b[31m\u202eb"])])
def test_any_name_can_be_drawn(name: str, write_part: Write) -> None:
    """Two dollars are no formula, and nothing in a name is a control character of the page."""
    for seed in (0, 1):
        folder = write_part(name, name, seed, 50.0, 60.0, weights=[{name: 0.2, "s": 0.8}, {name: 0.6, "s": 0.4}])
    text = page(whole_report(collect(folder.parents[2])))
    parsed(text)
    assert text.count("<svg") >= 3
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    shown = html.escape(name.replace("\x1b", " ").replace("\u202e", " "), quote=False)
    assert any(shown in figure for figure in figures)
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_page_of_the_least_there_can_be(write_part: Write) -> None:
    folder = write_part("a", "t", 0, 50.0, held_out=False, options={}, data={}, bytes_up={}, bytes_down={}, versions={})
    (folder / "rounds.jsonl").unlink()
    text = page(whole_report(collect(folder)))
    parsed(text)
    assert "no source kept a held-out part" in text
    assert "nothing to draw" in text
    assert "nothing to compare" in text


def test_mixed_machines_are_told(write_part: Write) -> None:
    write_part("a", "t", 0, 50.0)
    folder = write_part("a", "t", 1, 50.0, threads=8)
    assert "not run alike (threads)" in page(whole_report(collect(folder.parents[2])))


@pytest.mark.slow
def test_written_whole_or_not_at_all(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page(experiment, whole_report(collect(experiment)))
    assert path == experiment / "report.html"
    before = path.read_text(encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedshift.files.os.fsync", full)
    with pytest.raises(UserError, match=r"report\.html.*No space left"):
        write_page(experiment, whole_report(collect(experiment / "csac")))
    assert path.read_text(encoding="utf-8") == before
    assert [entry.name for entry in experiment.iterdir() if entry.name.startswith(".")] == []
    (experiment / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match="cannot write"):
        write_page(experiment / "taken", whole_report(collect(experiment)))


def test_curves_average_targets_within_a_seed(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(
        plots,
        "accuracy_over_rounds",
        lambda curves, _: drawn.update(curves) or accuracy_over_rounds(curves),
    )
    page(whole_report(collect(experiment)))
    # fedavg in round 1: seeds (81.5 + 71.5) / 2 = 76.5 and (83.5 + 75.5) / 2 = 79.5; csac has one whole seed.
    x, mean, spread = drawn["round"]["fedavg"]
    assert (x, mean) == ((1, 2), (78.0, 76.5))
    assert spread == pytest.approx((3 / 2**0.5, 3 / 2**0.5))
    assert drawn["round"]["csac"][1:] == ((81.0, 79.5), None)
    assert drawn["local mini-batches per site"]["fedavg"][0] == (10.0, 20.0)


def test_figures_of_many_methods_follow_the_page() -> None:
    figure = bytes_by_kind({"a": {"up": {"weights": 1e6, "statistics": 5e5}, "down": {}}})
    text = svg(figure, "sizes & more")
    assert text.startswith("<svg viewBox=")
    assert 'aria-label="sizes &amp; more"' in text
    assert not re.search(r"#[0-9a-f]{6}", text)
    assert "var(--s7)" in text
    assert "1.5" in text
    curves = {"round": {f"m{index}": ([1], [50.0 + index], None) for index in range(12)}}
    lines = accuracy_over_rounds(curves).axes[0].get_lines()
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == 12
    assert all(line.get_marker() not in ("", "None") for line in lines)
