"""Golden runs: every method gives the numbers on record, within what rounding on any processor may do to them."""

from __future__ import annotations

import json

import pytest
from golden import FILE, LEARNT, TRAINED, record

RUNS = json.loads(FILE.read_text(encoding="utf-8"))["runs"]


def kinds_of(name: str) -> list[str]:
    """Vectors first, on which a run is short; the other kind is slow."""
    return sorted(RUNS.get(name, {}), reverse=True)


CASES = [
    pytest.param(name, kind, marks=pytest.mark.slow if number else ())
    for name in TRAINED
    for number, kind in enumerate(kinds_of(name))
]


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_is_on_record(name: str) -> None:
    assert name in RUNS, (
        f"no golden run of '{name}': run `python tests/methods/golden.py {name}` and commit golden.json"
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_results_are_those_on_record(name: str, kind: str) -> None:
    numbers, learnt = record(name, [kind])
    assert numbers[kind] == {
        key: pytest.approx(of["value"], abs=of["tolerance"]) for key, of in RUNS[name][kind].items()
    }
    classes, accuracy = learnt[kind]
    assert classes == 3, "nothing is learnt where one class is predicted"
    assert accuracy > LEARNT


def test_a_record_tells_the_method_from_fedavg() -> None:
    """FedProx without its penalty is FedAvg, bit for bit: it must fail.

    APFL's common model is FedAvg's; its own ones, which are not on record, are told apart in test_personal.py.
    """
    alike = [
        (name, kind)
        for name in RUNS.keys() - {"fedavg", "apfl"}
        for kind, numbers in RUNS[name].items()
        if not any(
            abs(of["value"] - RUNS["fedavg"][kind][key]["value"])
            > of["tolerance"] + RUNS["fedavg"][kind][key]["tolerance"]
            for key, of in numbers.items()
            if key in RUNS["fedavg"][kind]
        )
    ]
    assert alike == []


def test_tolerances_are_narrow() -> None:
    wide = [
        (name, kind, key)
        for name, kinds in RUNS.items()
        for kind, numbers in kinds.items()
        for key, of in numbers.items()
        if of["tolerance"] > 0.002 * max(1.0, abs(of["value"]))
    ]
    assert wide == []
