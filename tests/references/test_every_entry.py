"""No entry of the references is left out, and each that is excused says why."""

from __future__ import annotations

import list_references
import pytest
from authors_numbers import COMPARED, FILES, HERE, LARGEST, NOT_YET, references

from fedshift.methods.index import ENTRIES


def every_comparison() -> set[tuple[str, str]]:
    """File and id of every entry that a test of this folder compares."""
    list_references.load_comparisons()
    return set(COMPARED)


@pytest.mark.parametrize("file", [name for name in FILES if (HERE / f"{name}.json").is_file()])
def test_every_entry_is_compared_or_says_why_not(file: str) -> None:
    compared = every_comparison()
    left_out = [
        entry
        for entry, reference in references(file).items()
        if (file, entry) not in compared | NOT_YET.keys()
        and not reference.outputs.keys() <= reference.differences.keys()
    ]
    assert left_out == []


@pytest.mark.parametrize("file", [name for name in FILES if (HERE / f"{name}.json").is_file()])
def test_a_difference_is_of_an_output_and_has_a_reason(file: str) -> None:
    for entry, reference in references(file).items():
        assert reference.differences.keys() <= reference.outputs.keys(), entry
        assert all(len(reason) > 20 for reason in reference.differences.values()), entry


@pytest.mark.parametrize("file", [name for name in FILES if (HERE / f"{name}.json").is_file()])
def test_a_rougher_comparison_has_a_reason(file: str) -> None:
    for entry, reference in references(file).items():
        assert reference.tolerance <= LARGEST or reference.tolerance_reason, entry


def test_the_page_says_with_whom_each_method_agrees() -> None:
    assert list_references.PAGE.read_text(encoding="utf-8") == list_references.page(), "run make references"


def test_what_is_not_compared_yet_is_not_compared() -> None:
    compared = every_comparison()
    assert not NOT_YET.keys() & compared
    assert all(entry in references(file) for file, entry in NOT_YET)


def test_every_method_has_numbers_of_others_or_a_derivation() -> None:
    assert list_references.without_evidence(ENTRIES) == []
    assert list_references.without_evidence(["a_new_one"]) == ["a_new_one"]


def test_what_holds_a_method_otherwise_is_there() -> None:
    for name, (_, where) in list_references.OTHERWISE.items():
        assert (HERE.parent / where).is_file(), name
        assert name in ENTRIES
    entries = {reference.method for _, reference in list_references.every()}
    assert set(list_references.NAMED.values()) <= entries
