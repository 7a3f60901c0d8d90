"""The streaming mean of models, the merge of BatchNorm statistics, and which keys are buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from fedshift.functional.averaging import MeanAccumulator, is_buffer, parameters_of, weighted_average
from fedshift.weights import Weights


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))
    model.train()(torch.randn(5, 3, 3, 3))
    return model


def finite(dtype: str) -> st.SearchStrategy[Tensor]:
    width = int(dtype.removeprefix("float"))
    elements = st.floats(width=width, allow_nan=False, allow_infinity=False)
    return arrays.arrays(dtype, arrays.array_shapes(max_dims=3, max_side=4), elements=elements).map(torch.from_numpy)


def test_parameters_are_what_training_moves() -> None:
    model = network()
    assert list(parameters_of(Weights(model.state_dict()))) == [name for name, _ in model.named_parameters()]


def test_buffers_are_known_by_name() -> None:
    state = network().state_dict()
    assert {name for name in state if is_buffer(name)} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert not is_buffer("my_running_mean")


def test_mean_agrees_with_numpy_in_float64() -> None:
    models = [network(seed).state_dict() for seed in range(4)]
    shares = [0.1, 0.4, 0.2, 0.3]
    average = MeanAccumulator()
    for model, share in zip(models, shares, strict=True):
        average.add(model, share)
    mean, exact = average.result(), average.result(torch.float64)
    for name in ("0.weight", "1.running_var", "3.bias"):
        expected = sum(w * m[name].double().numpy() for w, m in zip(shares, models, strict=True))
        torch.testing.assert_close(exact[name], torch.from_numpy(expected), rtol=0, atol=1e-15)
        assert torch.equal(mean[name], exact[name].float())
    assert mean["1.num_batches_tracked"].dtype == torch.int64


def test_integers_take_the_maximum_and_stay_integers() -> None:
    mean = weighted_average([{"n": torch.tensor(value)} for value in (3, 11, 5)], [1, 0, 1])
    assert mean["n"].dtype == torch.int64
    assert mean["n"].item() == 11


@given(
    st.sampled_from(["float16", "float32", "float64"]).flatmap(finite),
    st.lists(st.floats(0, 1e3), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-3),
    st.sampled_from(["mean", "moments"]),
)
@settings(max_examples=60)
def test_equal_models_stay_equal_bit_for_bit(tensor: Tensor, shares: list[float], rule: str) -> None:
    model = Weights({"w": tensor, "n": torch.tensor(7)})
    assert weighted_average([model] * len(shares), shares, rule).equal(model)  # type: ignore[arg-type]


def test_inputs_are_not_written_into() -> None:
    models = [Weights(network(seed).state_dict()) for seed in range(3)]
    before = [model.clone() for model in models]
    for rule in ("mean", "moments"):
        mean = MeanAccumulator(rule)  # type: ignore[arg-type]
        for model in models:
            mean.add(model, 0.5)
        first = mean.result()
        mean.add(models[0], 0.5)
        assert not first.equal(mean.result())
    assert all(model.equal(copied) for model, copied in zip(models, before, strict=True))


def test_one_weight_per_tensor() -> None:
    models = [{"a": torch.tensor(0.0), "b": torch.tensor(0.0)}, {"a": torch.tensor(8.0), "b": torch.tensor(8.0)}]
    mean = weighted_average(models, {"a": [3, 1], "b": [1, 3]})
    assert (mean["a"].item(), mean["b"].item()) == (2.0, 6.0)


def statistics(mean: float, variance: float) -> dict[str, Tensor]:
    return {"bn.running_mean": torch.tensor([float(mean)]), "bn.running_var": torch.tensor([float(variance)])}


def test_merged_moments_are_those_of_pooled_data() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n, 6) * scale + shift for n, scale, shift in ((40, 1, 0), (10, 3, 5), (50, 0.5, -2))]
    models = [
        {"running_mean": part.double().mean(0), "running_var": part.double().var(0, unbiased=False)} for part in parts
    ]
    merged = weighted_average(models, [len(part) for part in parts], bn_merge="moments")
    pooled = torch.cat(parts).double()
    torch.testing.assert_close(merged["running_mean"], pooled.mean(0))
    torch.testing.assert_close(merged["running_var"], pooled.var(0, unbiased=False))


def test_large_means_do_not_drown_small_variances() -> None:
    models = [statistics(30_000, 1e-4), statistics(30_000, 3e-4)]
    merged = weighted_average(models, [0.5, 0.5], bn_merge="moments")
    assert merged["bn.running_var"].item() == pytest.approx(2e-4, rel=1e-6)


def test_one_model_is_unchanged_and_other_tensors_are_averaged() -> None:
    model = Weights(network().state_dict())
    assert weighted_average([model], [0.3], bn_merge="moments").equal(model)
    others = [Weights(network(seed).state_dict()) for seed in (1, 2)]
    plain, merged = (weighted_average(others, [1, 2], rule) for rule in ("mean", "moments"))
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert changed == {"1.running_var"}
    assert (merged["1.running_var"] >= plain["1.running_var"]).all()


def test_a_result_is_nobody_else_s_memory() -> None:
    """Whoever changes one mean in place changes neither the next nor what goes on being added up."""
    mean = MeanAccumulator()
    mean.add({"w": torch.tensor([1.0]), "steps": torch.tensor(3)}, 2.0)
    first = mean.result()
    first["w"].add_(7)
    first["steps"].add_(7)
    second = mean.result()
    assert (second["w"].item(), second["steps"].item()) == (1.0, 3)
