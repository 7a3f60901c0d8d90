"""The lists of methods say what their classes say, and the one of the command line costs no import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import list_methods

from fedshift.errors import UserError
from fedshift.methods.federated.copa import COPA
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.index import ENTRIES, with_sealed
from fedshift.methods.method_tests import MethodTests
from fedshift.methods.traits import Traits

ROOT = Path(__file__).parents[2]


def test_the_index_and_the_tables_are_made_from_the_classes() -> None:
    made = "python docs/list_methods.py makes it anew"
    assert list_methods.INDEX.read_text(encoding="utf-8") == list_methods.index(), made
    for page in list_methods.TABLES:
        assert (ROOT / page).read_text(encoding="utf-8") == list_methods.filled(page), f"{page}: {made}"


def test_the_table_of_the_site_lists_every_method_once() -> None:
    first_columns = re.findall(r"^\|([^|]+)\|", list_methods.by_group(), flags=re.M)
    listed = sorted(name for column in first_columns for name in re.findall(r"`(\w+)`", column))
    assert listed == sorted(kind.name for kind in list_methods.classes())


@pytest.mark.parametrize("kind", list_methods.classes(), ids=lambda kind: kind.name)
def test_a_class_says_what_a_reader_of_the_list_needs(kind: type[FedAvg]) -> None:
    traits = kind.traits
    assert re.fullmatch(r".+ \d{4}( submission)?", traits.citation), "a citation ends with its year"
    assert traits.advice.endswith("."), "one sentence or more: what it is for, and what was measured"
    assert bool(traits.routed) == (kind.name in with_sealed())


def test_traits_of_one_class_are_not_inherited_and_options_change_those_of_an_object() -> None:
    mine = FedAvg.traits.derive(name="mine")
    inherited = FedAvg.traits
    assert mine == replace(
        Traits(),
        name="mine",
        tasks=inherited.tasks,
        averages=inherited.averages,
        server_reads="sums",
        tests=MethodTests(options=inherited.tests.options),
    )
    assert (COPA.traits.target, COPA(adaptation=True).traits.target) == ("unseen", "unlabelled")
    assert (COPA.traits.scenario, COPA(adaptation=True).traits.needs_target) == (
        "unseen target, or one without labels",
        True,
    )


def test_a_class_variable_that_belongs_to_the_traits_is_refused() -> None:
    with pytest.raises(UserError, match=r"Mine.pooled belongs to its traits: write traits = FedAvg.traits.derive\("):
        type("Mine", (FedAvg,), {"pooled": True, "__annotations__": {"pooled": "ClassVar[bool]"}})


@pytest.mark.slow
def test_the_list_does_without_torch() -> None:
    code = "import sys; from fedshift.cli import main; sys.argv = ['fedshift', 'methods']\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "False"
    assert "fedavg" in done.stdout


def test_an_entry_cannot_be_changed() -> None:
    assert len({hash(entry) for entry in ENTRIES.values()}) == len(ENTRIES), "lists have no hash"
