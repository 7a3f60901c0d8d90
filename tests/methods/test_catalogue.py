"""The list of methods says what their classes say, and costs no import of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedshift.methods import registry, robust
from fedshift.methods.catalogue import ENTRIES, ROBUST, RULES, SERVER
from fedshift.methods.composition.options import goes_with_server, robust_rules


@pytest.mark.parametrize("name", registry.names())
def test_an_entry_is_its_class(name: str) -> None:
    entry, kind = ENTRIES[name], registry.method_class(name)
    assert kind.name == name
    assert entry.scenario == kind.scenario + (", pooled" if kind.pooled else "")
    assert entry.shares == kind().shares
    assert entry.citation == kind.citation
    assert entry.settings == tuple(kind.settings)
    assert ROBUST.get(name, ()) == robust_rules(kind())
    assert (name in SERVER) == goes_with_server(kind())


def test_the_rules_are_those_that_exist() -> None:
    assert tuple(robust.RULES) == RULES


@pytest.mark.slow
def test_the_list_does_without_torch() -> None:
    code = "import sys; from fedshift.cli import main; sys.argv = ['fedshift', 'methods']\n"
    code += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "False"
    assert "fedavg" in done.stdout
