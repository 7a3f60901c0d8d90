"""Dice, contours and the boundary term: worked numbers, scipy's morphology, a loop over pairs, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.losses import dice_loss, task_loss
from fedshift.methods.federated.elcfs import (
    boundary_loss,
    contour,
    contrastive_loss,
    dilate,
    erode,
    region_means,
    surroundings,
)


def blobs(seed: int, n: int = 2, c: int = 2, size: int = 14) -> Tensor:
    noise = np.random.default_rng(seed).normal(size=(n, c, size, size))
    return torch.from_numpy((ndimage.gaussian_filter(noise, (0, 0, 2, 2)) > 0.05).astype(np.float64))


def test_worked_numbers_of_dice() -> None:
    s, t = torch.tensor([0.8, 0.2, 0.6]).double(), torch.tensor([1.0, 0, 1]).double()
    assert dice_loss(s.view(1, 1, 3, 1), t.view(1, 1, 3, 1)).item() == pytest.approx(0.222222, abs=1e-5)
    both = dice_loss(torch.stack([s, 1 - t]).view(1, 2, 3, 1), torch.stack([t, t]).view(1, 2, 3, 1))
    assert both.item() == pytest.approx((0.222222 + 1) / 2, abs=1e-5)  # the mean over structures


def test_the_sums_of_dice_run_over_the_whole_batch() -> None:
    """Two images of structures of different sizes are one image of both."""
    masks, said = torch.zeros(2, 1, 3, 3).double(), torch.rand(2, 1, 3, 3).double()
    masks[0, 0, 0, 0], masks[1] = 1, 1
    as_one = [torch.cat([*values], dim=1)[None] for values in (said, masks)]
    assert dice_loss(said, masks).item() == pytest.approx(dice_loss(*as_one).item(), abs=1e-12)
    of_each = torch.stack([dice_loss(said[[n]], masks[[n]]) for n in range(2)]).mean().item()
    assert dice_loss(said, masks).item() != pytest.approx(of_each, abs=1e-3)


@given(st.integers(0, 99))
def test_dice_is_between_zero_and_one(seed: int) -> None:
    masks = blobs(seed)
    assert dice_loss(masks, masks).item() == pytest.approx(0, abs=1e-9)
    assert 0 <= dice_loss(torch.rand_like(masks), masks).item() <= 1
    empty = torch.zeros_like(masks)
    assert dice_loss(empty, empty).item() == pytest.approx(0, abs=1e-9)


def test_the_loss_of_a_task() -> None:
    scores, masks = torch.randn(2, 2, 5, 5), blobs(1, size=5).float()
    assert task_loss(scores, masks) == dice_loss(torch.sigmoid(scores), masks)
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    assert task_loss(logits, labels) == torch.nn.functional.cross_entropy(logits, labels)
    with pytest.raises(UserError, match="shape"):
        task_loss(torch.randn(2, 3, 5, 5), masks)


@given(st.integers(0, 99), st.integers(1, 6))
def test_morphology_against_scipy(seed: int, steps: int) -> None:
    masks = blobs(seed)
    for n in range(2):
        for c in range(2):
            plain = masks[n, c].numpy().astype(bool)
            grown, shrunk = ndimage.binary_dilation(plain, None, steps), ndimage.binary_erosion(plain, None, steps)
            np.testing.assert_array_equal(dilate(masks, steps)[n, c].numpy(), grown)
            np.testing.assert_array_equal(erode(masks, steps)[n, c].numpy(), shrunk)
            np.testing.assert_array_equal(contour(masks)[n, c].numpy(), plain & ~ndimage.binary_erosion(plain))
            ring = ndimage.binary_dilation(plain, None, 5) & ~plain
            np.testing.assert_array_equal(surroundings(masks)[n, c].numpy(), ring)


def test_means_of_regions() -> None:
    maps = torch.arange(18.0).view(1, 2, 3, 3)
    regions = torch.zeros(1, 2, 3, 3)
    regions[0, 0, 0] = 1
    means, there = region_means(maps, regions)
    assert means[0, 0].tolist() == [1, 10]
    assert there.tolist() == [[True, False]]


def loop_over_pairs(embeddings: Tensor, labels: Tensor, temperature: float) -> float:
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    losses = []
    for a in range(len(labels)):
        negatives = [
            math.exp(float(unit[a] @ unit[n]) / temperature) for n in range(len(labels)) if labels[n] != labels[a]
        ]
        for p in range(len(labels)):
            if p != a and labels[p] == labels[a]:
                own = math.exp(float(unit[a] @ unit[p]) / temperature)
                losses.append(-math.log(own / (own + sum(negatives))))
    return sum(losses) / len(losses) if losses else 0.0


@given(st.integers(0, 99), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=40)
def test_contrast_against_a_loop(seed: int, ones: int, zeros: int) -> None:
    embeddings = torch.randn(ones + zeros, 5, generator=torch.Generator().manual_seed(seed)).double()
    labels = torch.tensor([1] * ones + [0] * zeros)
    found = contrastive_loss(embeddings, labels, 0.3)
    assert found.item() == pytest.approx(loop_over_pairs(embeddings, labels, 0.3), rel=1e-9, abs=1e-12)


def test_boundary_separates_contours_from_surroundings() -> None:
    masks = torch.zeros(2, 1, 20, 20)
    masks[:, :, 6:14, 6:14] = 1
    apart = torch.cat([contour(masks), surroundings(masks)], dim=1)
    assert boundary_loss(apart, masks).item() == pytest.approx(0, abs=1e-6)
    assert boundary_loss(torch.ones_like(apart), masks).item() == pytest.approx(math.log(3))  # 1 positive, 2 negatives
    assert boundary_loss(torch.rand(2, 4, 20, 20), torch.zeros(2, 3, 20, 20)).item() == 0  # no structure anywhere


@pytest.mark.parametrize("seed", range(3))
def test_volumes_have_six_neighbours(seed: int) -> None:
    """As SciPy's morphology of three axes."""
    noise = np.random.default_rng(seed).normal(size=(1, 1, 12, 13, 14))
    volume = ndimage.gaussian_filter(noise, (0, 0, 2, 2, 2)) > 0.05
    masks = torch.from_numpy(volume.astype(np.float64))
    for steps in (1, 2, 5):
        for ours, theirs in ((dilate, ndimage.binary_dilation), (erode, ndimage.binary_erosion)):
            assert np.array_equal(ours(masks, steps)[0, 0].numpy() > 0, theirs(volume[0, 0], None, steps))
    maps = torch.rand(1, 3, 12, 13, 14, dtype=torch.float64)
    means, _ = region_means(maps, contour(masks))
    edge = volume[0, 0] & ~ndimage.binary_erosion(volume[0, 0])
    np.testing.assert_allclose(means[0, 0].numpy(), maps[0].numpy()[:, edge].mean(1))
