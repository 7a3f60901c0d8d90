"""The list of mutations fits the code: a mutation that no longer applies is found at once, not by hand months later."""

from __future__ import annotations

import ast
import functools
from collections import Counter

import pytest
from mutations import ROOT, Mutation, all_mutations

MUTATIONS = all_mutations()
each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


@functools.cache
def program(text: str) -> str:
    return ast.dump(ast.parse(text))


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len(MUTATIONS) >= 150
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert max(Counter((mutation.module, mutation.old, mutation.new) for mutation in MUTATIONS).values()) == 1


@each
def test_it_applies_and_gives_another_program(mutation: Mutation) -> None:
    text = mutation.file(ROOT / "src").read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutation.applied(text))) != program(text)


@each
def test_its_tests_are_there(mutation: Mutation) -> None:
    assert mutation.tests
    for target in mutation.tests:
        path, _, name = target.partition("::")
        assert path.startswith("tests/")
        text = (ROOT / path).read_text(encoding="utf-8")
        if name:
            assert f"def {name.split('[')[0]}(" in text, target
