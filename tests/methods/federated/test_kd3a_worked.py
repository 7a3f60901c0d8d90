"""KD3A on numbers worked out by hand: vote, distillation, consensus focus (equations 7 and 8), shares (9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kd3a_written import focus_of, mean_row
from tiny import LINEAR, federation

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods.federated.kd3a import KD3A, Aggregate, Teachers, smooth_shares
from fedshift.weights import Weights

FIRST = ((0.95, 0.03, 0.02), (0.92, 0.05, 0.03), (0.02, 0.96, 0.02))
SECOND = ((0.91, 0.05, 0.04), (0.10, 0.30, 0.60), (0.05, 0.93, 0.02))
STUDENT = (0.7, 0.2, 0.1)
NUMBERS = {"south": 100, "north": 200, "east": 300}


def saying(*rows: Sequence[float]) -> Weights:
    """A linear network that says ``rows[i]`` of the i-th unit vector."""
    return Weights(
        {"classifier.weight": torch.tensor(rows).log().T.contiguous(), "classifier.bias": torch.zeros(len(rows[0]))}
    )


def told(
    method: KD3A,
    teachers: Sequence[Sequence[Sequence[float]]],
    samples: int,
    numbers: Mapping[str, int] = NUMBERS,
    previous: Mapping[str, float] | None = None,
    student: Sequence[float] = STUDENT,
    **options: Any,
) -> Aggregate:
    """The target's answer when it holds every unit vector equally often and ``teachers[k][i]`` is said of the i-th."""
    kinds = len(teachers[0])
    inputs = np.eye(kinds, dtype=np.float32)[np.arange(samples) % kinds]
    target = Domain("target", inputs, np.zeros(samples, np.int64))
    found = [Domain(name, inputs[:2], np.zeros(2, np.int64)) for name in list(numbers)[: len(teachers)]]
    where = federation(method, [*found, target], LINEAR, roles={"target": "target"}, **options)
    models = {domain.name: saying(*rows) for domain, rows in zip(found, teachers, strict=True)}
    return where.ask(
        method.distil,
        to=["target"],
        weights=saying(*[student] * kinds),
        models=models,
        samples={name: numbers[name] for name in models},
        previous=previous or {},
    ).only()


def of_first(gate: float = 0.9, **options: Any) -> KD3A:
    return KD3A(gate_start=gate, gate_end=gate, **{"mixup": 0, **options})


TEACHERS_OF_ONE = [[row] for row in FIRST]
TEACHERS_OF_TWO = list(zip(FIRST, SECOND, strict=True))


@pytest.mark.parametrize("vote", ["rows", "top1"])
def test_nobody_is_confident(vote: str) -> None:
    """Support 0.001 of the mean of all; hard labels have no weight, so nothing is learned from them."""
    mean = mean_row(FIRST)
    divergence = sum(p * math.log(p / q) for p, q in zip(mean, STUDENT, strict=True))
    soft = told(of_first(0.97, vote=vote), TEACHERS_OF_ONE, 6)
    assert soft.loss == pytest.approx(0.001 * divergence, rel=1e-4)
    assert soft.confident == 0
    hard = told(of_first(0.97, vote=vote, labels="hard"), TEACHERS_OF_ONE, 6)
    assert hard.loss == 0
    # Untouched: θ_T is the start, which every teacher's share is added to.
    shares = {**hard.shares, "target": hard.target_share}
    models = {**{name: saying(row) for name, row in zip(hard.shares, FIRST, strict=True)}, "target": saying(STUDENT)}
    for key, tensor in hard.weights.items():
        expected = torch.stack([share * models[name][key].double() for name, share in shares.items()]).sum(0)
        torch.testing.assert_close(tensor, expected.float(), atol=1e-6, rtol=1e-6)
    confident = told(of_first(0.97, vote=vote, target_share="confident"), TEACHERS_OF_ONE, 6)
    assert confident.target_share == 0
    if vote == "top1":  # no value at all: all share alike
        assert list(confident.shares.values()) == pytest.approx([1 / 3] * 3)


SHARES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    # N = (100, 200, 300) and the target's 400; its own share comes last
    "Shapley": ({"focus": "shapley"}, (0.143122, 0.177222, 0.279656, 0.4)),
    "leave-one-out": ({}, (0.195699, 0.391398, 0.012903, 0.4)),
    "samples": ({"focus": "samples"}, (0.1, 0.2, 0.3, 0.4)),
    "code": ({"focus": "shapley", "vote": "top1", "target_share": "confident"}, (0.3304, 0.2045, 0.2152, 0.25)),
    "samples and confident": ({"focus": "samples", "target_share": "confident"}, (0.125, 0.25, 0.375, 0.25)),
}


@pytest.mark.parametrize("case", SHARES)
def test_the_worked_shares(case: str) -> None:
    options, shares = SHARES[case]
    found = told(of_first(**options), TEACHERS_OF_TWO, 400)
    assert list(found.shares) == list(NUMBERS)
    assert [*found.shares.values(), found.target_share] == pytest.approx(shares, abs=6e-5)
    assert found.confident == 1


def test_a_site_that_comes_back_begins_with_its_share_of_now() -> None:
    """0.9 · (0.6, —, 0.4) + 0.1 · (0.2, 0.5, 0.3) is (0.56, 0.5, 0.39), over their sum of 1.45."""
    found = smooth_shares({"a": 0.6, "t": 0.4}, {"a": 0.2, "b": 0.5, "t": 0.3}, 0.9)
    assert found == pytest.approx({"a": 0.56 / 1.45, "b": 0.5 / 1.45, "t": 0.39 / 1.45})


NOTHING = (math.nan,) * 3
THIRD = ((0.05, 0.93, 0.02), (0.02, 0.92, 0.06), (0.04, 0.92, 0.04))
COUNTS = {"south": 100, "north": 200, "east": 300, "west": 50}


@pytest.mark.parametrize("sick", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["shapley", "leave_one_out"])
def test_the_shares_of_the_others_are_by_their_own_focus(sick: int, rule: str) -> None:
    """Four sources of different value; the sick one says that all classes are alike, which passes no gate."""
    rows = [list(teacher) for teacher in (FIRST, SECOND, THIRD)]
    rows.insert(sick, [NOTHING] * 3)
    names = list(COUNTS)
    found = told(of_first(focus=rule), rows, 9, numbers=COUNTS, student=STUDENT)
    assert set(found.shares) == set(names) - {names[sick]}
    alike = (1 / 3,) * 3
    samples = [[alike if k == sick else rows[k][kind] for k in range(4)] for kind in range(3)]
    value = focus_of(samples, 0.9, "rows", rule)
    products = {name: COUNTS[name] * value[k] for k, name in enumerate(names) if k != sick}
    assert len({round(product, 3) for product in products.values()}) == 3, "a mix-up would not show"
    kept = sum(COUNTS[name] for name in products)
    target = 9 / (kept + 9)
    assert found.target_share == pytest.approx(target, abs=1e-6)
    expected = {name: (1 - target) * product / sum(products.values()) for name, product in products.items()}
    assert dict(found.shares) == pytest.approx(expected, abs=1e-4)


def test_a_model_is_sound_if_it_predicts_for_every_sample() -> None:
    """Samples are 1, 2 and 1000: three models overflow at none, at the largest, and at all of them."""
    inputs = np.repeat(np.array([[1.0], [2.0], [1000.0]], np.float32), 3, axis=0)
    target = Domain("target", inputs, np.zeros(9, np.int64))
    sources = [Domain(name, inputs[:2], np.zeros(2, np.int64)) for name in ("a", "b", "c")]
    where = federation(of_first(), [*sources, target], LINEAR, roles={"target": "target"})
    assert isinstance(where, LocalFederation)
    site = where._runners["target"].site
    models = {
        name: Weights(
            {"classifier.weight": torch.tensor([[slope], [0.0], [-slope]]), "classifier.bias": torch.zeros(3)}
        )
        for name, slope in (("a", 0.01), ("b", 1e36), ("c", math.inf))
    }
    teachers = Teachers(site, list(models.values()), 0.9, own_statistics=True, whole_epoch=True, tally=None)
    assert teachers.finite(models) == ["a"]
