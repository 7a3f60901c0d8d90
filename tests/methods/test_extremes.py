"""Legal extremes of data: no method turns them to anything that is not a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from every_method import every_method_in_time, method_of
from tiny import CLASSES, CNN, NORMED, images, normed_for, run, vectors

from fedshift.data.domain import Domain
from tried import slow_after


def constant(number: int, value: int) -> Domain:
    pixels = np.full((number, 1, 12, 12), value, dtype=np.uint8)
    return Domain(f"constant-{value}", pixels, np.arange(number) % CLASSES)


def features(name: str, values: np.ndarray[Any, Any]) -> Domain:
    return Domain(name, values.astype(np.float32), np.arange(len(values)) % CLASSES)


def one_class(domain: Domain, label: int) -> Domain:
    return Domain(f"{domain.name}-{label}", domain.inputs, np.full(len(domain), label))


EXTREMES: dict[str, tuple[list[Domain], dict[str, Any]]] = {
    "constant images": ([constant(11, 0), constant(10, 255), constant(9, 128)], {}),
    "all-zero features": ([features(f"zero-{n}", np.zeros((9 + n, 5))) for n in range(3)], {}),
    "one class at each site": (
        [one_class(images("a", 9), 0), one_class(images("b", 17), 1), one_class(images("c", 4), 1)],
        {},
    ),
    "one class in all": ([one_class(vectors("a", 9), 2), one_class(vectors("b", 12), 2)], {}),
    "huge features": ([features(f"huge-{n}", vectors("x", 9 + n).inputs * 1e4) for n in range(3)], {"lr": 1e-7}),  # type: ignore[operator]
    "tiny features": ([features(f"tiny-{n}", vectors("x", 9 + n).inputs * 1e-6) for n in range(3)], {}),  # type: ignore[operator]
    "single samples": ([vectors("a", 1), vectors("b", 1)], {}),
    "one source": ([images("alone", 9)], {}),
    "equal sites": ([vectors("same", 9), Domain("twin", vectors("same", 9).inputs, vectors("same", 9).labels)], {}),
}


@pytest.mark.parametrize("case", slow_after(4, EXTREMES))
@every_method_in_time
def test_nothing_legal_turns_to_nan(name: str, case: str) -> None:
    found, options = EXTREMES[case]
    method, network = method_of(name), CNN if found[0].inputs.dtype == np.uint8 else NORMED
    if network is NORMED and normed_for(method) is not NORMED:
        pytest.skip("the method works on images alone")
    budget = 12 if method.traits.pooled else None  # as many steps as sites take
    state, _ = run(method, found, network, budget=budget, **options)
    state.weights.check_finite(case)  # raises
    assert all(np.isfinite(value) for value in state.report["losses"].values())
