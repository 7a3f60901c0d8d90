"""Spectra: worked numbers, NumPy's full transform with a shifted mask as the reference, invariants, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.spectra import amplitude, half_width, interpolate_amplitudes, low_frequencies


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(image: np.ndarray[Any, Any], donor: np.ndarray[Any, Any], rate: float, half: int) -> Any:
    """The whole spectrum, shifted, with the mask as a square around (⌊H/2⌋, ⌊W/2⌋)."""
    own, other = np.fft.fft2(image), np.fft.fft2(donor)
    mine, theirs = np.fft.fftshift(np.abs(own)), np.fft.fftshift(np.abs(other))
    row, column = image.shape[0] // 2, image.shape[1] // 2
    mask = np.zeros(image.shape)
    mask[row - half : row + half + 1, column - half : column + half + 1] = 1
    mixed = mine * (1 - mask) + ((1 - rate) * mine + rate * theirs) * mask
    return np.real(np.fft.ifft2(np.fft.ifftshift(mixed) * np.exp(1j * np.angle(own))))


@pytest.mark.parametrize(
    ("share", "size", "side"),
    [
        *[(0.01, 28, 1), (0.01, 32, 1), (0.01, 222, 5), (0.01, 224, 5), (0.01, 384, 7)],
        *[(0.05, 28, 3), (0.05, 32, 3), (0.05, 224, 23), (0.1, 28, 5), (0.1, 32, 7), (0.1, 224, 45)],
        *[(1 / 32, 32, 3), (0.29, 100, 59)],
    ],
)
def test_sides_of_the_window(share: float, size: int, side: int) -> None:
    assert 2 * half_width(share, size, size + 7) + 1 == side
    assert 2 * half_width(share, size + 7, size) + 1 == side


def test_the_widest_window_counts_no_frequency_twice() -> None:
    assert half_width(0.499, 4, 4) == 1
    assert half_width(0.499, 5, 9) == 2
    for share in (-0.1, 0.5, float("nan")):
        with pytest.raises(UserError):
            half_width(share, 8, 8)


def test_worked_numbers() -> None:
    image = torch.arange(16, dtype=torch.float64).view(1, 1, 4, 4)
    donor = (2 + torch.eye(4, dtype=torch.float64)).view(1, 1, 4, 4)
    half = half_width(0.25, 4, 4)
    expected = [0.125, 0.875, 0.625, 1.875, 3.875, 5.125, 4.875, 5.625, 3.625, 4.875, 5.125, 5.875, 7.875, 8.625, 8.875]
    found = interpolate_amplitudes(image, low_frequencies(donor, half), torch.tensor(0.5), half).flatten()
    torch.testing.assert_close(found, torch.tensor([*expected, 10.125], dtype=torch.float64), atol=1e-9, rtol=0)


@given(st.integers(3, 12), st.integers(3, 12), st.floats(0, 1), st.integers(0, 99), st.data())
@settings(max_examples=60)
def test_against_the_whole_spectrum(height: int, width: int, rate: float, seed: int, data: Any) -> None:
    half = data.draw(st.integers(0, (min(height, width) - 1) // 2))
    images, donors = draw(2, 3, height, width, seed=seed), draw(2, 3, height, width, seed=seed + 1)
    found = interpolate_amplitudes(
        images, low_frequencies(donors, half), torch.full((2, 1, 1, 1), rate, dtype=torch.float64), half
    )
    for n in range(2):
        for c in range(3):
            expected = reference(images[n, c].numpy(), donors[n, c].numpy(), rate, half)
            np.testing.assert_allclose(found[n, c].numpy(), expected, atol=1e-9)


def test_the_window_is_the_middle_of_the_shifted_amplitude() -> None:
    images = draw(3, 2, 10, 9)
    whole = np.fft.fftshift(np.abs(np.fft.fft2(images.numpy())), axes=(-2, -1))
    for half in (0, 1, 3):
        expected = whole[..., 5 - half : 6 + half, 4 : 5 + half]
        np.testing.assert_allclose(low_frequencies(images, half).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_rate_zero_and_ones_own_spectrum_change_nothing(dtype: torch.dtype, tolerance: float) -> None:
    images, donors = draw(4, 3, 32, 32).to(dtype), draw(4, 3, 32, 32, seed=1).to(dtype)
    for half in (0, 1, 5):
        still = interpolate_amplitudes(
            images, low_frequencies(donors, half), torch.zeros(4, 1, 1, 1, dtype=dtype), half
        )
        assert (still - images).abs().max() < tolerance
        for rate in (0.3, 1.0):
            own = interpolate_amplitudes(images, low_frequencies(images, half), torch.tensor(rate, dtype=dtype), half)
            assert (own - images).abs().max() < tolerance
    whole = interpolate_amplitudes(images, amplitude(images), torch.tensor(0.7, dtype=dtype), None)
    assert (whole - images).abs().max() < tolerance


def test_the_mean_alone() -> None:
    images, donors = draw(2, 3, 8, 8), draw(2, 3, 8, 8, seed=1)
    for rate in (1.0, 0.5):
        moved = interpolate_amplitudes(images, low_frequencies(donors, 0), torch.tensor(rate, dtype=torch.float64), 0)
        change = moved - images
        torch.testing.assert_close(change, change.mean((2, 3), keepdim=True).expand_as(change))
        means = (1 - rate) * images.mean((2, 3)) + rate * donors.mean((2, 3))
        torch.testing.assert_close(moved.mean((2, 3)), means)


def test_the_whole_spectrum_of_fact() -> None:
    images, donors = draw(2, 1, 6, 6), draw(2, 1, 6, 6, seed=1)
    moved = interpolate_amplitudes(images, amplitude(donors), torch.tensor(1.0).double(), None)
    torch.testing.assert_close(amplitude(moved), amplitude(donors))


@given(st.integers(0, 99), st.floats(0, 0.99))
@settings(max_examples=30)
def test_the_phase_stays(seed: int, rate: float) -> None:
    images, donors = draw(1, 1, 8, 10, seed=seed), draw(1, 1, 8, 10, seed=seed + 1)
    moved = interpolate_amplitudes(images, low_frequencies(donors, 2), torch.tensor(rate, dtype=torch.float64), 2)
    turn = torch.remainder(torch.fft.rfft2(moved).angle() - torch.fft.rfft2(images).angle() + torch.pi, 2 * torch.pi)
    turn = turn - torch.pi
    certain = amplitude(moved) > 1e-6
    assert turn[certain].abs().max() < 1e-6


def test_an_image_without_contrast_is_finite() -> None:
    grey = torch.full((1, 1, 8, 8), 0.5, dtype=torch.float64)
    moved = interpolate_amplitudes(grey, low_frequencies(draw(1, 1, 8, 8), 2), torch.tensor(1.0).double(), 2)
    assert torch.isfinite(moved).all()
    black = interpolate_amplitudes(grey * 0, low_frequencies(grey, 1), torch.tensor(1.0).double(), 1)
    torch.testing.assert_close(black, grey)


def test_gradient() -> None:
    images, donors = draw(1, 2, 5, 6).requires_grad_(), low_frequencies(draw(1, 2, 5, 6, seed=1), 1)
    assert torch.autograd.gradcheck(
        lambda x: interpolate_amplitudes(x, donors, torch.tensor(0.4).double(), 1), (images,)
    )


def test_sizes_that_do_not_fit() -> None:
    images = draw(1, 1, 8, 8)
    with pytest.raises(UserError, match="sizes"):
        interpolate_amplitudes(images, low_frequencies(images, 1), torch.tensor(1.0), 2)
    with pytest.raises(UserError, match="4"):
        low_frequencies(images, 4)


@pytest.mark.parametrize("half", [0, 1, 2])
@pytest.mark.parametrize("shape", [(6, 7, 8), (7, 6, 9)])
def test_volumes_by_the_whole_transform_of_numpy(shape: tuple[int, ...], half: int) -> None:
    draws = np.random.default_rng(0)
    own, other = draws.random((2, *shape)), draws.random((2, *shape))
    window = low_frequencies(torch.from_numpy(other), half, axes=3)
    assert window.shape == (2, 2 * half + 1, 2 * half + 1, half + 1)
    whole, donor = (np.fft.fftn(values, axes=(1, 2, 3)) for values in (own, other))
    mixed = np.abs(whole)
    for place in np.ndindex(*[2 * half + 1] * 3):
        at = (slice(None), *(part - half for part in place))
        mixed[at] = 0.3 * mixed[at] + 0.7 * np.abs(donor)[at]
        if place[2] >= half:
            at_window = (slice(None), place[0], place[1], place[2] - half)
            np.testing.assert_allclose(window.numpy()[at_window], np.abs(donor)[at])
    wanted = np.real(np.fft.ifftn(mixed * np.exp(1j * np.angle(whole)), axes=(1, 2, 3)))
    found = interpolate_amplitudes(torch.from_numpy(own), window, torch.tensor(0.7, dtype=torch.float64), half, axes=3)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)
