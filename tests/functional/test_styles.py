"""Styles, AdaIN and Lab: worked numbers, published colours, invariants, gradients."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.colour import lab_to_rgb, rgb_to_lab
from fedshift.functional.styles import adain, channel_styles
from fedshift.methods.composition.styles import StyleAccumulator, style_assignment
from fedshift.methods.federated.pardon import style_of_groups


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double()


def one(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_the_style_asked_for_comes_out(number: int, channels: int, seed: int) -> None:
    content, styles = (
        maps(number, channels, 5, 4, seed=seed),
        channel_styles(maps(number, channels, 6, 3, seed=seed + 1)),
    )
    means, deviations = channel_styles(adain(content, *styles))
    torch.testing.assert_close(means, styles[0])
    torch.testing.assert_close(deviations, styles[1], atol=1e-3, rtol=0)  # up to ε
    torch.testing.assert_close(adain(content, *channel_styles(content)), content, atol=1e-5, rtol=0)


def test_a_stream_has_the_statistics_of_the_whole() -> None:
    images = maps(11, 3, 4, 5).float()
    sums = StyleAccumulator()
    for part in images.split(4):
        sums.add(part)
    mean, deviation = sums.result()
    torch.testing.assert_close(mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(deviation, (images.var((0, 2, 3), correction=0) + 1e-5).sqrt())
    columns = StyleAccumulator()
    columns.add(images[:, :, 0, 0])
    torch.testing.assert_close(columns.result()[0], images[:, :, 0, 0].mean(0))


def test_a_constant_image_stays_finite() -> None:
    changed = adain(torch.full((2, 1, 3, 3), 0.5), torch.ones(2, 1), torch.ones(2, 1))
    torch.testing.assert_close(changed, torch.ones(2, 1, 3, 3))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_assignment(samples: int, domains: int, seed: int) -> None:
    """N·L versions without replacement; at L = K each sample has each domain once, its own among them."""
    for level in range(1, domains + 1):
        table = style_assignment(samples, domains, level, torch.Generator().manual_seed(seed))
        assert table.shape == (samples, level)
        assert all(len(set(row)) == level for row in table.tolist())
    assert torch.equal(table.sort(1).values, torch.arange(domains).expand(samples, -1))


def test_every_domain_is_chosen_alike() -> None:
    table = style_assignment(6000, 4, 2, torch.Generator().manual_seed(0))
    counts = torch.bincount(table.flatten(), minlength=4) / 6000
    torch.testing.assert_close(counts, torch.full((4,), 0.5), atol=0.03, rtol=0)


PUBLISHED = {
    (1.0, 1.0, 1.0): (100.0, 0.0, 0.0),
    (0.0, 0.0, 0.0): (0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0): (53.24, 80.09, 67.20),
    (0.0, 1.0, 0.0): (87.73, -86.18, 83.18),
    (0.0, 0.0, 1.0): (32.30, 79.19, -107.86),
    (0.5, 0.5, 0.5): (53.39, 0.0, 0.0),
}


def colour(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)


def test_published_colours() -> None:
    for rgb, lab in PUBLISHED.items():
        torch.testing.assert_close(rgb_to_lab(colour(rgb)), colour(lab), atol=0.02, rtol=0)


def test_there_and_back() -> None:
    images = maps(4, 3, 5, 5)
    torch.testing.assert_close(lab_to_rgb(rgb_to_lab(images)), images, atol=1e-7, rtol=0)
    torch.testing.assert_close(lab_to_rgb(rgb_to_lab(images.float())), images.float(), atol=1e-4, rtol=0)


def test_worked_style_of_groups() -> None:
    """Groups of (0, 2), (2, 4) and of (10, 10): means 2 and 10, mean squares 6 and 100."""
    mean, deviation = style_of_groups(torch.cat([one(0, 2), one(10, 10), one(2, 4)]), torch.tensor([0, 1, 0]))
    torch.testing.assert_close(mean, torch.tensor([6.0]).double())
    torch.testing.assert_close(deviation, torch.tensor([53.0 - 36 + 1e-5]).double().sqrt())


def test_a_style_of_one_group_is_the_overall_style() -> None:
    images = maps(5, 3, 4, 2)
    style = StyleAccumulator()
    style.add(images)
    for own, expected in zip(style_of_groups(images, torch.zeros(5, dtype=torch.int64)), style.result(), strict=True):
        torch.testing.assert_close(own.float(), expected)
