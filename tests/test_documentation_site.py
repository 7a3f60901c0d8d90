"""The documentation site: the functions that make its pages. ``make docs`` builds it from them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import fedshift
from fedshift.experiment.protocols.index import PROTOCOLS
from fedshift.methods.federated.csac import CSAC

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
METHODS = ROOT / "src" / "fedshift" / "methods"
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="docs/ is not beside these tests")


@pytest.fixture(scope="module")
def assemble() -> Iterator[ModuleType]:
    """The program that lays out the pages, with what it imports beside it."""
    places = [str(SITE), str(ROOT / "benchmarks"), str(ROOT / "docs")]
    sys.path[:0] = places
    import assemble

    yield assemble
    for place in places:
        sys.path.remove(place)


def test_a_method_has_its_equations_options_and_results(assemble: ModuleType) -> None:
    page = assemble.reference.method_page("csac", "the results")
    assert assemble.reference.described(sys.modules[CSAC.__module__].__doc__) in page
    assert assemble.reference.literal(CSAC.traits.advice) in page
    assert assemble.reference.literal("Use `practical` | [it].") == "Use `practical` \\| \\[it\\]."
    for option in CSAC.model_fields:
        assert page.count(f"\n| `{option}` |") == 1, option
    assert page.endswith("## Measured\n\nthe results")
    assert "No committed result" in assemble.reference.method_page("fedavg", "")


def test_equations_are_set(assemble: ModuleType) -> None:
    import equations

    fraction, power = "<mfrac><mn>1</mn><mn>2</mn></mfrac>", "<msup><mi>c</mi><mrow><mn>2</mn></mrow></msup>"
    both = "<msubsup><mi>G</mi><mrow><mi>l</mi></mrow><mrow><mi>h</mi></mrow></msubsup>"
    accent = '<mover accent="true"><mi>m</mi><mo stretchy="false">^</mo></mover>'
    for text, expected in (
        ("½", fraction),
        ("c²", power),
        ("c^{2}", power),
        ("c^(2)", power),
        ("G_l^h", both),
        ("m̂", accent),
        ("√c²", f"<msqrt>{power}</msqrt>"),
        ("e^−1", '<msup><mi>e</mi><mrow><mo form="prefix">−</mo><mn>1</mn></mrow></msup>'),
    ):
        assert equations.inline(text) == f"<math>{expected}</math>", text
    assert equations.inline("the mean of c² over a site") == f"the mean of <math>{power}</math> over a site"
    rows = equations.display(["    c² = 1      at a site    (2–4)", "        c = ½"])
    assert '<span class="number">(2–4)</span>' in rows
    assert "<span>at a site</span>" in rows
    assert rows.count('class="equation step1"') == 1


def test_a_docstring_becomes_a_page(assemble: ModuleType) -> None:
    import equations

    page = equations.described(
        "M: *not* one_word\n\nWire: of q_k\n 1. One\n    more ``x_y``.\n * no\nWith\n    c = 1\n"
    )
    one, wire, first, bullet, then, formula = page.split("\n\n")
    assert one == "M: *not* one\\_word"
    assert wire == "**Wire:** of <math><msub><mi>q</mi><mrow><mi>k</mi></mrow></msub></math>"
    assert (first, bullet, then) == ("1. One more ``x_y``.", "* no", "With")
    assert formula.startswith('<div class="equations">')


def test_no_symbol_of_a_method_is_left_unset(assemble: ModuleType) -> None:
    import equations

    for file in [*(METHODS / "federated").glob("*.py"), *(METHODS / "pooled").glob("*.py")]:
        page = equations.described(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
        for formula in re.findall(r"<math>.*?</math>", page):
            ElementTree.fromstring(formula)
        words = re.sub(r"<math>.*?</math>|<code>.*?</code>|`+[^`]+`+", "", page)
        assert not re.search(r"\w[_^]|(?<![a-z][a-z0-9])\\_", words), file.name


def test_everything_is_in_the_reference_and_in_a_table_of_contents() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (SITE / "pages" / "reference").glob("*.md"))
    for name in fedshift.__all__:
        assert re.search(rf"^\.\. auto\w+:: (fedshift\.methods\.base|fedshift)\.{name}$", pages, re.M), name
    listed = "".join(page.read_text(encoding="utf-8") for page in (SITE / "pages").rglob("*.md"))
    for page in (ROOT / "docs").glob("*.md"):
        assert f"\ndocs/{page.stem}\n" in listed, page.name


def test_results_stand_beside_the_published_row(assemble: ModuleType) -> None:
    found = assemble.measured.collect(ROOT / "benchmarks" / "results" / "rotated_mnist_ablation")
    rows = assemble.measured.rows_of(found)
    lines = rows["csac"].splitlines()
    labels = [label for label in found.order.methods if label.startswith("csac")]
    assert [re.sub(r"\\", "", line.split(" | ")[0][2:]) for line in lines[2 : 2 + len(labels)]] == labels
    table = assemble.measured.report_of(found).table
    assert f"| {table.cells[labels[0]]['average'].mean} ± " in lines[2]
    entry = {"source": "a paper", "rows": {"ELCFS (FedDG)": {"M0": [73.07, 0.67], "average": [88.6, None]}}}
    assert "| ELCFS (FedDG) | 73.07 ± 0.67 | 88.60 |" in assemble.measured.published_row("elcfs", entry)
    assert assemble.measured.published_row("csac", entry) == ""


def test_a_data_set_and_the_experiment_file_name_every_field(assemble: ModuleType) -> None:
    page = assemble.reference.dataset_page("rotated_digits")
    assert "| `per_class` |" in page
    assert "**Licence:**" in page
    file = assemble.reference.experiment_file()
    for kind, section in PROTOCOLS.items():
        part = file.partition(f"## protocol, kind {kind}\n")[2].partition("\n## ")[0]
        assert all(f"| `{field}` |" in part for field in section.model_fields)


def test_parts_of_a_page(assemble: ModuleType) -> None:
    assert assemble.reference.cell("a|b `c|d`\n*e*") == "a\\|b `c\\|d` \\*e\\*"
    text = assemble.reference.command_line()
    assert "\n* `run`: Run an experiment" in text
    assert not re.search(r"^\* `\w+`.*\.\.\.$", text, re.M)
    assert assemble.reference.literal("call it with --fetch or `--no-such`: a--b") == (
        "call it with `--fetch` or `--no-such`: a--b"
    )
    symbol = "<math><msub><mi>N</mi><mrow><mi>k</mi></mrow></msub></math>"
    assert assemble.reference.meaning("share N_k of\n`a|b` | c_d or file_name") == (
        f"share {symbol} of `a\\|b` \\| {symbol.replace('N', 'c').replace('k', 'd')} or file\\_name"
    )
    svg = assemble.in_light_colours((ROOT / "docs" / "demo.svg").read_text(encoding="utf-8"))
    assert "prefers-color-scheme" not in svg
    ElementTree.fromstring(svg)
    script = '"""Your table: does it work?\n\nMore."""\n\nx = """y"""\n'
    titled = '"""\nYour table\n==========\n\nDoes it work?\n\nMore.\n"""\n\nx = """y"""\n'
    assert assemble.titled(script) == titled


def test_links_to_files_that_are_no_pages_become_their_names(assemble: ModuleType, tmp_path: Path) -> None:
    page = ROOT / "docs" / "design.md"
    text = assemble.with_links(page, {page, ROOT / "docs" / "extend.md"})
    assert "(extend.md)" in text
    assert "(../tests/test_layering.py)" not in text
    assert "`tests/test_layering.py`" in text
    (tmp_path / "page.md").write_text("[there](nowhere.md)", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        assemble.with_links(tmp_path / "page.md", set())


def test_pages_get_what_is_not_committed(assemble: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {mark for page in (ROOT / "docs").glob("*.md") for mark in assemble.SITE.findall(page.read_text("utf-8"))}
    assert marks == assemble.MADE.keys()
    assert assemble.whole(ROOT / "docs" / "threats.md", "a <!-- site threats --> b").count("\n| ") > 80
    assert "* **Binding.**" in assemble.docstring("deploy/secure/__init__.py")
    monkeypatch.setattr(assemble.summarise, "more", lambda name: f"all of {name}")
    page = assemble.whole(ROOT / "benchmarks" / "rivals.md", "See `five_digits` and `leakage`.\n")
    assert page == "See `five_digits` and `leakage`.\n\n## All numbers\n\n### five_digits\n\nall of five_digits"
    assert assemble.whole(ROOT / "docs" / "scale.md", "`five_digits`") == "`five_digits`"


def test_dead_links_are_found(assemble: ModuleType, tmp_path: Path) -> None:
    import dead_links

    (tmp_path / "b.html").write_text('<h1 id="here"></h1><img src="no.png">', encoding="utf-8")
    links = ("b.html", "b.html#here", "#top", "https://example.org/x", "b.html#there", "c.html")
    (tmp_path / "a.html").write_text("".join(f'<a href="{link}">' for link in links), encoding="utf-8")
    assert list(dead_links.dead_links(tmp_path)) == [
        "a.html links to b.html#there",
        "a.html links to c.html",
        "b.html links to no.png",
    ]
