"""BatchNorm-MMD: worked numbers, its closed form as the minimum, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedshift.functional.averaging import weighted_average
from fedshift.methods.federated.kd3a import batchnorm_distance, batchnorm_objective
from fedshift.weights import Weights


def model(mean: Tensor, variance: Tensor) -> Weights:
    return Weights({"bn.running_mean": mean, "bn.running_var": variance, "bn.num_batches_tracked": torch.tensor(3)})


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 999))
def test_the_closed_form_is_the_minimum(models: int, channels: int, seed: int) -> None:
    means, variances = random(seed, models, channels), random(seed + 1, models, channels).abs() + 0.1
    shares = random(seed + 2, models).softmax(0)
    stack = [model(mean, variance) for mean, variance in zip(means, variances, strict=True)]
    best = weighted_average(stack, shares.tolist(), bn_merge="moments")
    mean, deviation = best["bn.running_mean"], best["bn.running_var"].sqrt()
    batch = torch.stack([mean - deviation, mean + deviation]).requires_grad_()
    least = batchnorm_objective(batch, means, variances, shares)
    (gradient,) = torch.autograd.grad(least, batch)
    assert gradient.abs().max() < 1e-9
    other = batch.detach() + random(seed + 3, 2, channels)
    assert batchnorm_objective(other, means, variances, shares) >= least - 1e-12


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 999))
def test_objective_against_its_sums(models: int, channels: int, seed: int) -> None:
    maps, shares = random(seed, 3, channels, 2, 4), random(seed + 1, models).softmax(0)
    means, variances = random(seed + 2, models, channels), random(seed + 3, models, channels).abs()
    expected = 0.0
    for k in range(models):
        for c in range(channels):
            values = maps[:, c].flatten().tolist()
            m, v = means[k, c].item(), variances[k, c].item()
            first = sum(values) / len(values) - m
            second = sum(value**2 for value in values) / len(values) - (v + m**2)
            expected += shares[k].item() * (first**2 + second**2)
    found = batchnorm_objective(maps, means, variances, shares)
    assert found.item() == pytest.approx(expected)
    flat = maps.permute(0, 2, 3, 1).reshape(-1, channels)
    torch.testing.assert_close(batchnorm_objective(flat, means, variances, shares), found)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 999))
@settings(max_examples=15)
def test_the_distance_is_the_objective_of_one_model(first: int, second: int, width: int, seed: int) -> None:
    x, y = random(seed, first, width), random(seed + 1, second, width) + 1
    left, right = ((batch.mean(0), batch.var(0, correction=0)) for batch in (x, y))
    expected = batchnorm_objective(x, right[0][None], right[1][None], torch.ones(1).double())
    assert batchnorm_distance(model(*left), model(*right)) == pytest.approx(expected.item(), abs=1e-9)


def test_distance_of_whole_models() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network(torch.randn(8, 3, 2, 2))
    after = network.state_dict()
    expected = 0.0
    for layer in ("1.", "2.0."):
        means = [weights[layer + "running_mean"] for weights in (before, after)]
        seconds = [
            weights[layer + "running_var"] + mean**2 for weights, mean in zip((before, after), means, strict=True)
        ]
        expected += ((means[0] - means[1]) ** 2).sum().item() + ((seconds[0] - seconds[1]) ** 2).sum().item()
    assert batchnorm_distance(before, after) == pytest.approx(expected, rel=1e-5)
    assert batchnorm_distance(before, after, per_channel=True) == pytest.approx(expected / 8, rel=1e-5)
    plain = nn.Linear(2, 2).state_dict()
    assert batchnorm_distance(plain, plain) == batchnorm_distance(plain, plain, per_channel=True) == 0
