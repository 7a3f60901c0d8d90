"""Amplitude spectra of images, the low-frequency window, and interpolation between two amplitudes.

Sources: FedDG-ELCFS (Liu et al., CVPR 2021) and FACT (Xu et al., CVPR 2021). Images are real, so one half of a spectrum
mirrors the other. Only the half that `torch.fft.rfft2` returns is kept: frequencies u of rows in FFT order, v of
columns from 0 to ⌊W/2⌋.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import UserError


def amplitude(images: Tensor) -> Tensor:
    """Amplitude ``A = |F(x)|`` per channel, in units of the pixels times H·W.

    Args:
        images: (…, H, W).

    Returns:
        (…, H, ⌊W/2⌋ + 1).

    Example:
        >>> amplitude(torch.ones(2, 2))  # all energy is at frequency zero
        tensor([[4., 0.],
                [0., 0.]])
    """
    return _spectrum(images).abs()


def half_width(share: float, height: int, width: int) -> int:
    """Half-width ``b = ⌊L·min(H, W)⌋`` of the window, a square of side 2b + 1 around frequency zero (ELCFS).

    Args:
        share: L in [0, 0.5).
        height: H.
        width: W.

    Returns:
        b, at most ⌊(min(H, W) − 1)/2⌋, so that no frequency counts twice.

    Raises:
        UserError: L is outside [0, 0.5).

    Example:
        >>> half_width(0.01, 224, 300)
        2
    """
    if not 0 <= share < 0.5:
        raise UserError(f"the window's share of the image must be at least 0 and below 0.5, found {share}")
    smallest = min(height, width)
    return min(int(share * smallest + 1e-9), (smallest - 1) // 2)


def low_frequencies(images: Tensor, half: int) -> Tensor:
    """Amplitudes in the low-frequency window: rows u = −b … b, columns v = 0 … b. Columns v < 0 mirror these.

    Args:
        images: (…, H, W).
        half: b, at least 0.

    Returns:
        (…, 2b + 1, b + 1).

    Raises:
        UserError: the window exceeds the spectrum.

    Example:
        >>> low_frequencies(torch.ones(4, 4), half=1)
        tensor([[ 0.,  0.],
                [16.,  0.],
                [ 0.,  0.]])
    """
    height, width = images.shape[-2:]
    return _window(_spectrum(images), height, width, half).abs()


def interpolated(images: Tensor, donors: Tensor, rate: Tensor, half: int | None) -> Tensor:
    """Images under the amplitudes of others: ``x' = Re F⁻¹(A'·e^{iP})`` with ``A' = A(1−M) + [(1−λ)A + λA_j]M``.

    Where the own amplitude is zero the phase is taken as zero. Values may leave the range of pixels.

    Args:
        images: (…, H, W), with own A and P.
        donors: A_j as `low_frequencies` gives them; with ``half`` None the whole spectrum as `amplitude` does (FACT).
        rate: λ, of a shape that broadcasts with (…, 1, 1).
        half: b of the window M, or None for the whole spectrum.

    Raises:
        UserError: the donors have another window.

    Example:
        >>> dark, bright = torch.full((4, 4), 0.25), torch.full((4, 4), 0.75)
        >>> interpolated(dark, low_frequencies(bright, 0), torch.tensor(0.5), half=0)[0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    height, width = images.shape[-2:]
    spectrum = _spectrum(images)
    own = spectrum if half is None else _window(spectrum, height, width, half)
    if donors.shape[-2:] != own.shape[-2:]:
        raise UserError(
            f"amplitudes of {donors.shape[-2]}×{donors.shape[-1]} frequencies do not fit a window of "
            f"{own.shape[-2]}×{own.shape[-1]}: spectra of images of different sizes cannot mix"
        )
    amplitudes = own.abs()
    directions = torch.where(amplitudes > 0, own / amplitudes, 1)
    change = rate * (donors - amplitudes) * directions
    if half is None:
        return images + _image(change, height, width)
    # Nothing changes outside the window, so the inverse of the change alone is added.
    whole = torch.zeros_like(spectrum)
    whole[..., : half + 1, : half + 1] = change[..., half:, :]
    if half:
        whole[..., height - half :, : half + 1] = change[..., :half, :]
    return images + _image(whole, height, width)


def _spectrum(images: Tensor) -> Tensor:
    found: Tensor = torch.fft.rfft2(images)
    return found


def _image(spectrum: Tensor, height: int, width: int) -> Tensor:
    found: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return found


def _window(spectrum: Tensor, height: int, width: int, half: int) -> Tensor:
    """The part of a half spectrum with |u| ≤ b and 0 ≤ v ≤ b, u in rising order."""
    if half < 0 or 2 * half + 1 > min(height, width):
        raise UserError(f"a window of half-width {half} does not fit the spectrum of images of {height}×{width}")
    columns = spectrum[..., : half + 1]
    if half == 0:
        return columns[..., :1, :]
    return torch.cat([columns[..., height - half :, :], columns[..., : half + 1, :]], dim=-2)
