"""CSAC's aggregation: the worked numbers and what must hold for any models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from fedshift.errors import TrainingDiverged, UserError
from fedshift.methods.federated.csac import (
    distance_weighted,
    distances,
    divergence_aggregate,
    divergence_weights,
    fused_from_sums,
    tensor_distance,
)
from fedshift.weights import Weights

ROWS = [(0.0, 0.0), (0.0, 3.0), (9.0, 0.0)]
BIASES = [0.0, 2.0, 1.0]
DISTANCES = ("l2", "l1", "cosine")


def layer(rows: list[tuple[float, float]], biases: list[float] | None = None) -> list[Weights]:
    models = [{"fc.weight": torch.tensor([row])} for row in rows]
    for model, bias in zip(models, biases or [], strict=False):
        model["fc.bias"] = torch.tensor([bias])
    return [Weights(model) for model in models]


def random_models(count: int, seed: int = 0) -> list[Weights]:
    torch.manual_seed(seed)
    return [
        Weights(
            {
                "conv.weight": torch.randn(4, 3, 3, 3),
                "conv.bias": torch.randn(4),
                "bn.weight": torch.randn(4),
                "bn.running_mean": torch.randn(4),
                "bn.running_var": torch.rand(4) + 0.1,
                "bn.num_batches_tracked": torch.tensor(10 + index),
            }
        )
        for index in range(count)
    ]


def test_worked_similarity() -> None:
    """The shares by distance and both fused models are the authors', in tests/references."""
    _, weights = divergence_aggregate(layer(ROWS), rule="similarity")
    assert weights["fc.weight"] == pytest.approx((0.417200, 0.365908, 0.216892), abs=1e-6)
    fused, _ = divergence_aggregate(layer(ROWS), rule="average")
    assert fused["fc.weight"][0].tolist() == pytest.approx((3.0, 1.0), abs=1e-6)


def test_joint_weights_of_a_module() -> None:
    _, weights = divergence_aggregate(layer(ROWS, BIASES), granularity="module")
    assert weights["fc.weight"] == pytest.approx([0.252387, 0.284730, 0.462883], abs=1e-6)
    assert weights["fc.bias"] == weights["fc.weight"]


@pytest.mark.parametrize("kind", DISTANCES)
def test_module_distance_is_that_of_the_concatenated_parameters(kind: str) -> None:
    model, mean = random_models(2)
    found = distances(model, mean, kind, "module")  # type: ignore[arg-type]
    flat = [torch.cat([m["conv.weight"].flatten(), m["conv.bias"]]) for m in (model, mean)]
    assert found["conv.weight"] == pytest.approx(tensor_distance(*flat, kind))  # type: ignore[arg-type]
    # Buffers take over their module's distance and do not enter it.
    alone = tensor_distance(model["bn.weight"], mean["bn.weight"], kind)  # type: ignore[arg-type]
    assert found["bn.running_var"] == found["bn.running_mean"] == found["bn.weight"] == alone
    assert "bn.num_batches_tracked" not in found
    buffers = distances(model.select("bn").without("bn.weight"), mean, kind, "module")  # type: ignore[arg-type]
    flat = [torch.cat([m["bn.running_mean"], m["bn.running_var"]]) for m in (model, mean)]
    assert buffers["bn.running_var"] == pytest.approx(tensor_distance(*flat, kind))  # type: ignore[arg-type]


def test_zero_vectors_have_a_cosine_distance() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert tensor_distance(zero, zero, "cosine") == 0
    assert tensor_distance(zero, one, "cosine") == 1
    assert tensor_distance(one, zero, "cosine") == 1
    assert tensor_distance(one, -one, "cosine") == pytest.approx(2)


def test_parallel_vectors_are_at_no_distance_but_a_rounding_step_of_float32_is() -> None:
    torch.manual_seed(0)
    vector = torch.randn(1000)
    assert tensor_distance(vector, vector.double() / 3, "cosine") == 0
    assert tensor_distance(vector, vector * (1 / 3), "cosine") > 0


def test_distance_agrees_with_torch_over_several_pieces() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(200_001).double(), torch.randn(200_001).double()
    assert tensor_distance(a, b, "l2") == pytest.approx(torch.dist(a, b, 2).item())
    assert tensor_distance(a, b, "l1") == pytest.approx(torch.dist(a, b, 1).item())
    cosine = torch.cosine_similarity(a, b, dim=0).item()
    assert tensor_distance(a, b, "cosine") == pytest.approx(1 - cosine)


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([0, 0, 0], "divergence", [1 / 3] * 3),
        ([0, 0, 0], "similarity", [1 / 3] * 3),
        ([0, 1, 3], "divergence", [0, 0.25, 0.75]),
        ([0, 1, 3], "similarity", [1, 0, 0]),
        ([0, 1, 0], "similarity", [0.5, 0, 0.5]),
        ([0, 1, 3], "average", [1 / 3] * 3),
        ([5e-324, 5e-324], "similarity", [0.5, 0.5]),
        ([1e308, 1e308], "divergence", [0.5, 0.5]),
        ([7.0], "divergence", [1]),
    ],
)
def test_zeros_and_extremes(values: list[float], rule: str, expected: list[float]) -> None:
    assert divergence_weights(values, rule) == pytest.approx(expected, abs=1e-15)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=20), st.sampled_from(["divergence", "similarity", "average"]))
def test_weights_are_on_the_simplex(values: list[float], rule: str) -> None:
    shares = divergence_weights(values, rule)  # type: ignore[arg-type]
    assert abs(sum(shares) - 1) < 1e-12
    assert min(shares) >= 0


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_weights_follow_their_sites(values: list[float], random) -> None:  # type: ignore[no-untyped-def]
    order = random.sample(range(len(values)), len(values))
    for rule in ("divergence", "similarity"):
        shares = divergence_weights(values, rule)  # type: ignore[arg-type]
        assert divergence_weights([values[i] for i in order], rule) == [shares[i] for i in order]  # type: ignore[arg-type]


SHAPED = arrays.arrays("float32", (2, 5), elements=st.floats(-1e6, 1e6, width=32)).map(torch.from_numpy)


@given(SHAPED, SHAPED)
@settings(max_examples=40)
def test_two_sites_always_share_equally(first: Tensor, second: Tensor) -> None:
    for kind in ("l2", "l1"):
        for rule in ("divergence", "similarity"):
            _, weights = divergence_aggregate([{"w": first}, {"w": second}], kind, rule=rule)  # type: ignore[arg-type]
            assert weights["w"] == pytest.approx([0.5, 0.5], abs=1e-9)


@given(SHAPED, st.integers(1, 7), st.sampled_from(DISTANCES), st.sampled_from(["tensor", "module"]))
@settings(max_examples=40)
def test_equal_models_stay_equal_bit_for_bit(tensor: Tensor, count: int, kind: str, granularity: str) -> None:
    model = Weights({"fc.weight": tensor, "fc.bias": tensor[0], "n": torch.tensor(3)})
    for rule in ("divergence", "similarity", "average"):
        out, weights = divergence_aggregate([model] * count, kind, granularity, rule)  # type: ignore[arg-type]
        assert out.equal(model)
        assert weights == {name: [1 / count] * count for name in ("fc.weight", "fc.bias")}


@pytest.mark.parametrize("kind", DISTANCES)
def test_order_of_sites_does_not_matter(kind: str) -> None:
    models, order = random_models(4), [2, 0, 3, 1]
    out, weights = divergence_aggregate(models, kind)  # type: ignore[arg-type]
    turned, turned_weights = divergence_aggregate([models[i] for i in order], kind)  # type: ignore[arg-type]
    for name, row in weights.items():
        assert sum(row) == pytest.approx(1, abs=1e-12)
        assert turned_weights[name] == pytest.approx([row[i] for i in order], rel=1e-9)
        torch.testing.assert_close(turned[name], out[name], rtol=1e-6, atol=1e-7)


def test_variances_stay_positive_and_counters_integers() -> None:
    out, _ = divergence_aggregate(random_models(5))
    assert (out["bn.running_var"] > 0).all()
    assert out["bn.num_batches_tracked"].dtype == torch.int64
    assert out["bn.num_batches_tracked"].item() == 14


class Replayed:
    """Models made anew in every pass; remembers how many passes were begun."""

    def __init__(self, count: int) -> None:
        self.count, self.passes = count, 0

    def __iter__(self) -> Iterator[Weights]:
        self.passes += 1
        for index in range(self.count):
            yield random_models(1, seed=index)[0]


def test_three_passes_over_what_can_be_replayed_equal_a_list() -> None:
    replayed = Replayed(4)
    out, weights = divergence_aggregate(replayed)
    listed, listed_weights = divergence_aggregate(list(Replayed(4)))
    assert replayed.passes == 3
    assert out.equal(listed)
    assert weights == listed_weights
    average = Replayed(4)
    divergence_aggregate(average, rule="average")
    assert average.passes == 1


def test_what_cannot_be_aggregated() -> None:
    models = random_models(3)
    with pytest.raises(UserError, match="once"):
        divergence_aggregate(iter(models))
    with pytest.raises(UserError):
        divergence_aggregate([])
    with pytest.raises(UserError, match=r"model 1.*conv\.bias"):
        divergence_aggregate([models[0], models[1].without("conv.bias")])
    bad = models[1].merge({"conv.bias": torch.full((4,), float("nan"))})
    with pytest.raises(TrainingDiverged, match=r"conv\.bias"):
        divergence_aggregate([models[0], bad, models[2]])

    class Shrinking(Replayed):
        def __iter__(self) -> Iterator[Weights]:
            yield from super().__iter__()
            self.count -= 1

    with pytest.raises(UserError, match="passes"):
        divergence_aggregate(Shrinking(4))


def test_inputs_are_not_written_into() -> None:
    models = random_models(3)
    before = [model.clone() for model in models]
    divergence_aggregate(models)
    assert all(model.equal(copied) for model, copied in zip(models, before, strict=True))


def test_squared_distances_by_hand() -> None:
    """Distances 1, 2, 3: squares 1, 4, 9 of 14; by similarity 1, 1/4, 1/9, that is 36, 9, 4 of 49."""
    assert divergence_weights([1.0, 2.0, 3.0], power=2) == pytest.approx([1 / 14, 4 / 14, 9 / 14])
    assert divergence_weights([1.0, 2.0, 3.0], "similarity", 2) == pytest.approx([36 / 49, 9 / 49, 4 / 49])
    assert divergence_weights([1.0, 3.0], power=1) == divergence_weights([1.0, 3.0])


def test_a_high_power_leaves_the_farthest_site_alone() -> None:
    fused, shares = divergence_aggregate(layer(ROWS), power=200)
    assert shares["fc.weight"] == pytest.approx([0, 0, 1], abs=1e-12)
    assert fused["fc.weight"][0].tolist() == pytest.approx(list(ROWS[2]), abs=1e-12)


def test_fusing_from_two_sums_is_fusing_from_the_models() -> None:
    generator = torch.Generator().manual_seed(2)
    models = [
        Weights({"w": torch.randn(4, 3, generator=generator), "b": torch.ones(2), "n": torch.tensor(number)})
        for number in range(4)
    ]
    fused, _ = divergence_aggregate(models, power=1.5)
    centre = torch.stack([model["w"] for model in models]).mean(0)
    mean = Weights({"w": centre, "b": torch.ones(2), "n": torch.tensor(3)})
    parts = [distance_weighted(model, mean, power=1.5) for model in models]
    sums = [{name: sum(part[side][name] for part in parts) for name in ("w", "b")} for side in (0, 1)]
    found = fused_from_sums(mean, sums[0], sums[1])
    assert torch.allclose(found["w"], fused["w"], atol=1e-6)
    assert not torch.allclose(mean["w"], fused["w"], atol=1e-3)
    assert torch.equal(found["b"], torch.ones(2))  # no distance at all
    assert found["n"].item() == 3
