"""The list of mutations fits the code: a mutation that no longer applies is found at once, not by hand months later."""

from __future__ import annotations

from collections import Counter

import pytest
from mutations import Mutation, all_mutations

MUTATIONS = all_mutations()
MODULES = sorted({mutation.module for mutation in MUTATIONS})


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len(MUTATIONS) >= 150
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert max(Counter((mutation.module, mutation.old, mutation.new) for mutation in MUTATIONS).values()) == 1


@pytest.mark.parametrize("module", MODULES)
def test_they_apply_and_their_tests_are_there(module: str) -> None:
    of_module: list[Mutation] = [mutation for mutation in MUTATIONS if mutation.module == module]
    text = of_module[0].file().read_text(encoding="utf-8")
    for mutation in of_module:
        assert mutation.applied(text) != text, mutation.name
        assert mutation.targets()
