"""The list of methods says what their classes say, and costs no import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedshift.methods import registry, robust
from fedshift.methods.advice import GROUPS
from fedshift.methods.catalogue import ENTRIES, LOCAL, ROBUST, RULES, SERVER, reads, tasks
from fedshift.methods.composition.options import goes_with_server, robust_rules

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", registry.names())
def test_an_entry_is_its_class(name: str) -> None:
    entry, kind = ENTRIES[name], registry.method_class(name)
    assert kind.name == name
    assert entry.scenario == kind.scenario + (", pooled" if kind.pooled else "")
    assert entry.shares == kind().shares
    assert entry.citation == kind.citation
    assert entry.settings == tuple(kind.settings)
    assert ROBUST.get(name, ()) == robust_rules(kind())
    assert reads(name) == kind().reads
    assert tasks(name) == kind().tasks
    assert (name in SERVER) == goes_with_server(kind())
    assert (name in LOCAL) == (not kind.pooled and kind().takes_plug_ins)


def test_the_rules_are_those_that_exist() -> None:
    assert tuple(robust.RULES) == RULES


def test_every_method_is_in_one_group_with_advice() -> None:
    members = [name for group in GROUPS.values() for name in group]
    assert sorted(members) == sorted(registry.names())
    assert all(advice.endswith(".") for group in GROUPS.values() for advice in group.values())


def test_the_numbers_of_the_advice_stand_on_the_pages_of_the_benchmarks() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in BENCHMARKS.glob("*.md")).replace("-", "−")
    numbers = {number for group in GROUPS.values() for advice in group.values()
               for number in re.findall(r"\d+\.\d\d+", re.sub(r"\(p [=<] [\d.]+\)", "", advice))}  # fmt: skip
    assert len(numbers) > 30
    assert sorted(number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", pages)) == []


@pytest.mark.slow
def test_the_list_does_without_torch() -> None:
    code = "import sys; from fedshift.cli import main; sys.argv = ['fedshift', 'methods']\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "False"
    assert "fedavg" in done.stdout
