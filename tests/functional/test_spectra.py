"""Spectra: worked numbers, NumPy's full transform with a shifted mask as the reference, invariants, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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


def test_the_whole_spectrum_of_fact() -> None:
    images, donors = draw(2, 1, 6, 6), draw(2, 1, 6, 6, seed=1)
    moved = interpolate_amplitudes(images, amplitude(donors), torch.tensor(1.0).double(), None)
    torch.testing.assert_close(amplitude(moved), amplitude(donors))


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
