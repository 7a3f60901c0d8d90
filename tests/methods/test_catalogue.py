"""The list of methods says what their classes say, and costs no import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedshift.methods import registry, robust
from fedshift.methods.advice import GROUPS
from fedshift.methods.catalogue import ENTRIES, ROUTED, RULES, Entry
from fedshift.methods.composition.options import robust_rules

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", registry.names())
def test_an_entry_is_its_class(name: str) -> None:
    kind = registry.method_class(name)
    method = kind()
    entry = ENTRIES[name]
    wanted = Entry(
        place=f"{kind.__module__}:{kind.__name__}",
        scenario=entry.scenario,
        shares=method.shares,
        citation=entry.citation,
        settings=tuple(kind.settings),
        reads=method.reads,
        rules=robust_rules(method),
        server=bool(method.averages),
        local=method.takes_plug_ins,
        tasks=method.tasks,
    )
    assert kind.name == name
    assert entry == wanted, f"in methods/catalogue.py '{name}' must give {wanted}"
    assert entry.scenario.endswith(", pooled") == kind.pooled
    assert entry.scenario.startswith("unseen target") == (method.target == "unseen")
    assert ("with labels" in entry.scenario) == (method.target == "labelled")
    assert re.search(r"\d{4}", entry.citation), "a citation has a year"
    assert (name in ROUTED) == bool(getattr(method, "routed", {}))


def test_the_rules_are_those_that_exist() -> None:
    assert tuple(robust.RULES) == RULES


def test_the_page_of_rules_says_what_they_do_to_every_method() -> None:
    page = BENCHMARKS.with_name("docs") / "robust_aggregation.md"
    section = page.read_text(encoding="utf-8").partition("## Which method")[2].partition("\n## ")[0]
    lacking = [name for name, entry in ENTRIES.items() if entry.rules and f"`{name}`" not in section]
    assert not lacking, "add them to the second table of docs/robust_aggregation.md"


def test_every_method_is_in_one_group_with_advice() -> None:
    members = [name for group in GROUPS.values() for name in group]
    assert len(set(members)) == len(members)
    assert set(members) == set(registry.names()), "every method has one sentence in GROUPS of methods/advice.py"
    assert all(advice.endswith(".") for group in GROUPS.values() for advice in group.values())


def test_the_numbers_of_the_advice_stand_in_tables_that_the_results_fill() -> None:
    """``benchmarks/test_results.py`` fills these tables again, and holds every p against claims.yaml."""
    pages = "\n".join(
        table
        for page in BENCHMARKS.glob("*.md")
        for table in re.findall(r"<!-- table .*?<!-- end -->", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    ).replace("-", "−")
    numbers = {number for group in GROUPS.values() for advice in group.values()
               for number in re.findall(r"\d+\.\d\d+", re.sub(r"\bp( here)? [=<] [\d.]+", "", advice))}  # fmt: skip
    assert len(numbers) > 30
    assert sorted(number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", pages)) == []


def test_the_first_number_of_an_advice_stands_in_a_row_of_the_method() -> None:
    """A number can stand in some other method's row by chance, after the row that it came from is gone."""
    tables = re.findall(r"<!-- table .*?<!-- end -->", "".join(map(Path.read_text, BENCHMARKS.glob("*.md"))), re.DOTALL)
    rows = "\n".join(tables).replace("-", "−").replace("\\", "").splitlines()
    absent = []
    for group in GROUPS.values():
        for method, advice in group.items():
            first = re.search(r"\d+\.\d\d+", re.sub(r"\bp( here)? [=<] [\d.]+", "", advice))
            own = [row for row in rows if re.match(rf"\| {method}\b", row)]
            if first and not any(re.search(rf"(?<![\d.]){re.escape(first[0])}(?!\d)", row) for row in own):
                absent.append((method, first[0]))
    assert absent == []


@pytest.mark.slow
def test_the_list_does_without_torch() -> None:
    code = "import sys; from fedshift.cli import main; sys.argv = ['fedshift', 'methods']\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "False"
    assert "fedavg" in done.stdout
