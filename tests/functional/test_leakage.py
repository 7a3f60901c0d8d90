"""Gradient leakage: exact inversions, distances, and measures of likeness against loops written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedshift.functional.leakage import (
    best_match,
    correlation,
    cosine_distance,
    gradients_in_update,
    infer_label,
    infer_labels,
    invert_linear,
    mean_squared_errors,
    pseudo_gradient,
    psnr,
    squared_distance,
    ssim,
    total_variation,
)


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient_of(network: nn.Module, inputs: Tensor, labels: list[int]) -> list[Tensor]:
    loss = F.cross_entropy(network(inputs), torch.tensor(labels))
    return list(torch.autograd.grad(loss, list(network.parameters())))


@given(st.integers(1, 6), st.integers(2, 5), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=30)
def test_the_first_layer_of_any_network_leaks_one_sample(width: int, classes: int, hidden: int, seed: int) -> None:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(width, hidden), nn.Sigmoid(), nn.Linear(hidden, classes)).double()
    x, label = torch.randn(1, width).double(), seed % classes
    weight, bias, _, last = gradient_of(network, x, [label])
    torch.testing.assert_close(invert_linear(weight, bias), x[0], rtol=1e-6, atol=1e-8)
    assert infer_label(last) == label
    assert infer_labels(last, torch.full((classes,), 1 / classes), 1) == [label]


def test_of_several_samples_the_inversion_is_a_weighted_mean() -> None:
    weight = torch.tensor([[1.0, 3.0]])  # two samples, (1, 0) and (0, 1), that moved the unit by 1 and 3
    torch.testing.assert_close(invert_linear(weight, torch.tensor([4.0])), torch.tensor([0.25, 0.75]))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=50)
def test_labels_are_counted_exactly_when_the_probabilities_are_known(labels: list[int], seed: int) -> None:
    logits = torch.randn(len(labels), 5, generator=draws(seed)).double()
    probabilities = logits.softmax(1)
    bias = (probabilities - F.one_hot(torch.tensor(labels), 5)).mean(0)
    assert infer_labels(bias, probabilities.mean(0), len(labels)) == sorted(labels)


def test_labels_with_estimated_probabilities_are_as_many_as_asked_for() -> None:
    bias = torch.tensor([0.2, -0.3, -0.05, 0.15])
    assert infer_labels(bias, torch.full((4,), 0.25), 4) == [1, 1, 2, 3]  # owed 0.2, 2.2, 1.2, 0.4
    assert infer_labels(bias, torch.full((4,), 0.25), 1) == [1]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_gradients_in_an_update_against_sgd(momentum: float, nesterov: bool, steps: int) -> None:
    """With a gradient that never changes, the update is so many times that gradient."""
    gradient = torch.tensor([0.5, -2.0], dtype=torch.float64)
    before = torch.tensor([1.0, 1.0], dtype=torch.float64)
    after = before.clone().requires_grad_()
    optimizer = torch.optim.SGD([after], lr=0.1, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        after.grad = gradient.clone()
        optimizer.step()
    [found] = pseudo_gradient([before], [after.detach()], 0.1)
    torch.testing.assert_close(found / gradients_in_update(steps, momentum, nesterov), gradient)


def test_worked_numbers_of_distances() -> None:
    first = [torch.tensor([[1.0, 2.0]]), torch.tensor([2.0])]
    second = [torch.tensor([[1.0, 0.0]]), torch.tensor([5.0])]
    assert squared_distance(first, second).item() == pytest.approx(4 + 9)
    assert cosine_distance(first, second).item() == pytest.approx(1 - 11 / (3 * 26**0.5))
    assert squared_distance(first, first).item() == 0
    assert cosine_distance(first, first).item() == pytest.approx(0, abs=1e-6)


def test_cosine_distance_does_not_see_scale() -> None:
    first, second = ([torch.randn(3, 2, generator=draws(s)), torch.randn(4, generator=draws(s + 9))] for s in (0, 1))
    expected = cosine_distance(first, second)
    torch.testing.assert_close(cosine_distance([7 * part for part in first], second), expected)
    torch.testing.assert_close(cosine_distance(second, first), expected)
    torch.testing.assert_close(cosine_distance([-part for part in first], second), 2 - expected)


@pytest.mark.parametrize("distance", [squared_distance, cosine_distance])
def test_gradients_of_distances(distance: object) -> None:
    observed = [torch.randn(2, 3, generator=draws(1)).double(), torch.randn(2, generator=draws(2)).double()]
    parts = [torch.randn(part.shape, generator=draws(3)).double().requires_grad_() for part in observed]
    assert torch.autograd.gradcheck(lambda *given: distance(given, observed), parts)  # type: ignore[operator]
    assert torch.autograd.gradgradcheck(lambda *given: distance(given, observed), parts)  # type: ignore[operator]


def test_distance_to_a_gradient_of_zeros_is_finite() -> None:
    nothing = torch.zeros(3, requires_grad=True)
    value = cosine_distance([nothing], [torch.ones(3)])
    assert value.item() == 1
    (found,) = torch.autograd.grad(value, nothing)
    assert found.isfinite().all()


def test_total_variation() -> None:
    image = torch.tensor([[[[0.0, 1.0], [2.0, 4.0]]]], dtype=torch.float64)
    assert total_variation(image).item() == (2 + 3) / 2 + (1 + 2) / 2
    assert total_variation(torch.full((2, 3, 4, 5), 0.3)).item() == 0
    assert total_variation(torch.ones(1, 1, 1, 1)).item() == 0
    assert total_variation(torch.tensor([[[[1.0, 4.0]]]])).item() == 3
    images = torch.rand(2, 3, 5, 5, generator=draws(0)).double()
    for changed in (images.flip(-1), images.flip(-2), images.mT, images + 3, 1 - images):
        torch.testing.assert_close(total_variation(changed), total_variation(images))
    assert torch.autograd.gradcheck(total_variation, (images.requires_grad_(),))


def naive_ssim(x: np.ndarray, y: np.ndarray, size: int, peak: float) -> float:
    """SSIM of two images (h, w), each moment a loop over the window."""
    middle = size // 2
    window = np.array(
        [[math.exp(-((i - middle) ** 2 + (j - middle) ** 2) / (2 * 1.5**2)) for j in range(size)] for i in range(size)]
    )
    window /= window.sum()
    values = []
    for top in range(x.shape[0] - size + 1):
        for left in range(x.shape[1] - size + 1):
            a, b = (image[top : top + size, left : left + size] for image in (x, y))
            ma, mb = (window * a).sum(), (window * b).sum()
            va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
            cov = (window * (a - ma) * (b - mb)).sum()
            c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
            values.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("height", "width", "size"), [(14, 16, 11), (11, 11, 11), (10, 13, 9), (8, 8, 7), (2, 9, 1), (1, 1, 1)]
)
def test_ssim_against_a_loop(height: int, width: int, size: int) -> None:
    first = torch.rand(2, 3, height, width, generator=draws(0)).double()
    second = (first + 0.3 * torch.randn(first.shape, generator=draws(1)).double()).clamp(0, 1)
    expected = [
        np.mean([naive_ssim(a.numpy(), b.numpy(), size, 1.0) for a, b in zip(x, y, strict=True)])
        for x, y in zip(first, second, strict=True)
    ]
    assert ssim(first, second).tolist() == pytest.approx(expected)


def test_invariances_of_ssim() -> None:
    first, second = (torch.rand(3, 1, 12, 15, generator=draws(seed)).double() for seed in (0, 1))
    value = ssim(first, second)
    assert ssim(first, first).tolist() == pytest.approx([1, 1, 1])
    torch.testing.assert_close(ssim(second, first), value)
    torch.testing.assert_close(ssim(first.flip(-1), second.flip(-1)), value)
    torch.testing.assert_close(ssim(first.mT, second.mT), value)
    torch.testing.assert_close(ssim(255 * first, 255 * second, peak=255.0), value)
    assert (value < 0.5).all()
    flat = torch.full_like(first, 0.4)
    assert ssim(flat, flat).tolist() == pytest.approx([1, 1, 1])


def test_psnr() -> None:
    assert psnr(0.0) == math.inf
    assert psnr(0.01) == pytest.approx(20)
    assert psnr(6.5025, peak=255) == pytest.approx(40)
    first, second = np.random.default_rng(0).random((2, 5, 4))
    total = 0.0
    for a, b in zip(first.ravel(), second.ravel(), strict=True):
        total += (a - b) ** 2
    pair = torch.from_numpy(np.stack([first, second]))
    error = mean_squared_errors(pair[:1], pair[1:]).item()
    assert psnr(error) == pytest.approx(10 * math.log10(1 / (total / 20)))
    assert psnr(mean_squared_errors(pair[:1], pair[:1]).item()) == math.inf


def test_errors_of_pairs_keep_small_differences() -> None:
    first = torch.rand(3, 2, 30, 30, generator=draws(0)) + 100
    second = torch.cat([first, first + 1e-3])
    errors = mean_squared_errors(first, second)
    naive = torch.stack([torch.stack([(a - b).square().mean() for b in second]) for a in first])
    torch.testing.assert_close(errors, naive, rtol=1e-4, atol=1e-10)
    assert errors.diagonal().tolist() == [0, 0, 0]


@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=40)
def test_best_match_against_all_assignments(number: int, more: int, seed: int) -> None:
    errors = torch.rand(number, number + more, generator=draws(seed))
    found = best_match(errors)
    assert len(set(found.tolist())) == number
    least = min(
        sum(errors[row, column].item() for row, column in enumerate(columns))
        for columns in itertools.permutations(range(number + more), number)
    )
    assert errors[torch.arange(number), found].sum().item() == pytest.approx(least)


def test_correlation() -> None:
    first, second = (torch.randn(3, 2, 4, generator=draws(seed)).double() for seed in (0, 1))
    expected = [np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1] for a, b in zip(first, second, strict=True)]
    assert correlation(first, second).tolist() == pytest.approx(expected)
    assert correlation(first, 3 * first + 7).tolist() == pytest.approx([1, 1, 1])
    assert correlation(first, -first).tolist() == pytest.approx([-1, -1, -1])
    assert correlation(first, torch.ones_like(first)).tolist() == [0, 0, 0]
