"""Rules of robust aggregation: worked numbers, invariants, and numpy or scipy where they have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats
from scipy.spatial.distance import cdist
from torch import Tensor

from fedshift.methods import robust
from fedshift.methods.robust import coordinate_median, krum, krum_scores, squared_distances, trimmed_mean

Model = dict[str, Tensor]


def models(*rows: list[float]) -> list[Model]:
    return [{"w": torch.tensor(row, dtype=torch.float32)} for row in rows]


def several(least: int, most: int = 9) -> st.SearchStrategy[list[Model]]:
    """Models of a matrix and a vector."""
    numbers = st.floats(-1e6, 1e6, width=32)

    def made(rows: np.ndarray) -> list[Model]:
        return [{"a": torch.from_numpy(row[:4].reshape(2, 2)), "b": torch.from_numpy(row[4:])} for row in rows]

    shapes = st.integers(least, most).map(lambda count: (count, 7))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=numbers)).map(made)


def flat(model: Mapping[str, Tensor]) -> np.ndarray:
    return torch.cat([tensor.reshape(-1) for tensor in model.values()]).numpy()


def table(found: list[Model]) -> np.ndarray:
    return np.stack([flat(model) for model in found])


class Once:
    """Models that are read one by one, and how often."""

    def __init__(self, found: list[Model]) -> None:
        self.found, self.passes = found, 0

    def __iter__(self) -> Iterator[Model]:
        self.passes += 1
        return ({name: tensor.clone() for name, tensor in model.items()} for model in self.found)


def test_counters_take_the_lower_median() -> None:
    counts = [{"n": torch.tensor(value)} for value in (7, 5, 2**62, 5)]
    assert coordinate_median(counts)["n"] == 5
    assert trimmed_mean(counts, 1)["n"].dtype == torch.int64
    assert trimmed_mean([{"n": torch.tensor(value)} for value in (7, 5, 2**62, 9)], 1)["n"] == 7


@given(several(1))
def test_median_is_numpy_s(found: list[Model]) -> None:
    expected = np.median(table(found).astype(float), 0)
    np.testing.assert_allclose(flat(coordinate_median(found)), expected, rtol=1e-6, atol=1e-44)  # float32 ends there


@given(several(5), st.integers(0, 2))
def test_trimmed_mean_is_scipy_s(found: list[Model], trim: int) -> None:
    expected = stats.trim_mean(table(found).astype(float), (trim + 0.5) / len(found), axis=0)
    np.testing.assert_allclose(flat(trimmed_mean(found, trim)), expected, rtol=1e-5, atol=1e-1)


@given(several(5), st.randoms())
def test_the_order_of_sites_does_not_matter(found: list[Model], random: object) -> None:
    other = list(found)
    random.shuffle(other)  # type: ignore[attr-defined]
    assert coordinate_median(found).equal(coordinate_median(other))
    assert trimmed_mean(found, 2).equal(trimmed_mean(other, 2))


@given(several(5), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_one_site_moves_no_number_beyond_the_others(found: list[Model], value: float) -> None:
    bad = {name: torch.full_like(tensor, value) for name, tensor in found[0].items()}
    low, high = table(found).min(0), table(found).max(0)
    for result in (coordinate_median([bad, *found]), trimmed_mean([bad, *found], 1)):
        assert (flat(result) >= low).all()
        assert (flat(result) <= high).all()


@given(several(1, 1), st.integers(5, 9))
def test_equal_models_give_themselves(found: list[Model], number: int) -> None:
    for result in (coordinate_median(found * number), trimmed_mean(found * number, 2)):
        assert flat(result).tolist() == flat(found[0]).tolist()


@pytest.mark.parametrize("at_once", [1, 100, 10_000, 1 << 30])
def test_memory_bounds_the_numbers_held_and_not_the_result(at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)
    found = [
        {"long": torch.randn(70_000, generator=generator), "n": torch.tensor(4), "none": torch.zeros(0)}
        if at_once >= 10_000
        else {"long": torch.randn(50, generator=generator), "n": torch.tensor(4), "none": torch.zeros(0)}
        for _ in range(5)
    ]
    read = Once(found)
    result = coordinate_median(read, at_once)
    size = 5 * 4 * len(found[0]["long"])
    assert read.passes >= 1 + min(size // at_once, len(found[0]["long"]))
    assert read.passes == 2 or at_once < size
    assert result["long"].equal(torch.stack([model["long"] for model in found]).median(0).values)
    assert list(result) == ["long", "n", "none"]
    assert squared_distances(read, at_once)[0, 1] == pytest.approx(
        float((found[0]["long"].double() - found[1]["long"].double()).square().sum())
    )


@given(several(5))
def test_distances_are_scipy_s(found: list[Model]) -> None:
    whole = table(found).astype(float)
    np.testing.assert_allclose(
        squared_distances(found).numpy(), cdist(whole, whole, "sqeuclidean"), rtol=1e-9, atol=1e-9
    )


def test_a_huge_model_does_not_blur_the_others() -> None:
    distances = squared_distances(models([1e30], [0.5], [0.5 + 2**-20]))
    assert distances[1, 2] == 2.0**-40


@given(several(5), st.integers(0, 3))
def test_scores_are_those_of_the_definition(found: list[Model], faulty: int) -> None:
    faulty = min(faulty, (len(found) - 3) // 2)
    whole = table(found).astype(float)
    expected = []
    for own in range(len(found)):
        others = sorted(((whole[own] - whole[other]) ** 2).sum() for other in range(len(found)) if other != own)
        expected.append(sum(others[: len(found) - faulty - 2]))
    assert krum_scores(squared_distances(found), faulty) == pytest.approx(expected)


@given(several(6), st.integers(0, 5), st.floats(1e8, 1e30))
def test_krum_keeps_no_outlier(found: list[Model], place: int, value: float) -> None:
    found[place] = {name: torch.full_like(tensor, value) for name, tensor in found[place].items()}
    kept = krum(squared_distances(found), 1, keep=len(found) - 1)
    assert place not in kept
    assert len(set(kept)) == len(found) - 1


def test_worked_clipping() -> None:
    centre, model = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 6.0]), "n": torch.tensor(3)}
    assert robust.update_norm(model, centre) == 5
    shorter = robust.move_towards(centre, model, robust.clip_factor(5, 2.5))
    assert shorter["w"].tolist() == [2.5, 4]
    assert shorter["n"] == 3
    assert robust.lower_median([5, 1, 2, 9]) == 2


@given(several(2, 2), st.floats(0, 1e6))
def test_a_clipped_update_is_no_longer_than_the_bound(found: list[Model], bound: float) -> None:
    centre, model = found
    norm = robust.update_norm(model, centre)
    clipped = robust.move_towards(centre, model, robust.clip_factor(norm, bound))
    assert robust.update_norm(clipped, centre) <= min(norm, bound) * (1 + 1e-6) + 1
    if norm <= bound:
        assert clipped.equal(model)


@settings(max_examples=50)
@given(several(3, 3), st.floats(0.125, 64))
def test_trust_depends_on_the_direction_alone(found: list[Model], factor: float) -> None:
    centre = {name: torch.zeros_like(tensor) for name, tensor in found[0].items()}
    longer = {name: tensor.double() * factor for name, tensor in found[0].items()}
    trusted = found[1]
    assert robust.trust_score(centre, trusted, centre) == 0
    score = robust.trust_score(found[0], trusted, centre)
    assert 0 <= score <= 1
    assert robust.trust_score(longer, trusted, centre) == pytest.approx(score, abs=1e-9)
