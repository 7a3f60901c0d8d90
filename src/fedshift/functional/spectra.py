"""Amplitude spectra of images and volumes, the low-frequency window, and interpolation between two amplitudes.

Sources: FedDG-ELCFS (Liu et al., CVPR 2021) and FACT (Xu et al., CVPR 2021). Images are real, so one half of a spectrum
mirrors the other. Only the half that `torch.fft.rfft2` returns is kept: frequencies u of rows in FFT order, v of
columns from 0 to ⌊W/2⌋. A volume has a further axis of rows: with ``axes`` 3 all that is said of rows holds for its
slices, too, and the window is a cube. The papers have images only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedshift.errors import UserError


def amplitude(images: Tensor, axes: int = 2) -> Tensor:
    """Amplitude ``A = |F(x)|`` per channel, in units of the pixels times H·W.

    ``images``: (…, H, W). ``axes``: how many of the last axes are space. Returns (…, H, ⌊W/2⌋ + 1).

    Example:
        >>> amplitude(torch.ones(2, 2))  # all energy is at frequency zero
        tensor([[4., 0.],
                [0., 0.]])
    """
    return _spectrum(images, axes).abs()


def half_width(share: float, *sides: int) -> int:
    """Half-width ``b = ⌊L·min(H, W)⌋`` of the window, a square of side 2b + 1 around frequency zero (ELCFS).

    ``share``: L in [0, 0.5). ``sides``: H and W, of a volume D, H and W. Returns b, at most ⌊(min(H, W) − 1)/2⌋, so
    that no frequency counts twice. Raises UserError: L is outside [0, 0.5).

    Example:
        >>> half_width(0.01, 224, 300)
        2
    """
    if not 0 <= share < 0.5:
        raise UserError(f"the window's share of the image must be at least 0 and below 0.5, found {share}")
    smallest = min(sides)
    return min(int(share * smallest + 1e-9), (smallest - 1) // 2)


def low_frequencies(images: Tensor, half: int, axes: int = 2) -> Tensor:
    """Amplitudes in the low-frequency window: rows u = −b … b, columns v = 0 … b. Columns v < 0 mirror these.

    ``images``: (…, H, W). ``half``: b, at least 0. ``axes``: how many of the last axes are space. Returns (…, 2b + 1, b
    + 1), of volumes (…, 2b + 1, 2b + 1, b + 1). Raises UserError: the window exceeds the spectrum.

    Example:
        >>> low_frequencies(torch.ones(4, 4), half=1)
        tensor([[ 0.,  0.],
                [16.,  0.],
                [ 0.,  0.]])
    """
    return _window(_spectrum(images, axes), images.shape[-axes:], half).abs()


def interpolate_amplitudes(images: Tensor, donors: Tensor, rate: Tensor, half: int | None, axes: int = 2) -> Tensor:
    """Images under the amplitudes of others: ``x' = Re F⁻¹(A'·e^{iP})`` with ``A' = A(1−M) + [(1−λ)A + λA_j]M``.

    Where the own amplitude is zero the phase is taken as zero. Values may leave the range of pixels.

    ``images``: (…, H, W), with own A and P. ``donors``: a_j as `low_frequencies` gives them; with ``half`` None the
    whole spectrum as `amplitude` does (FACT). ``rate``: λ, of a shape that broadcasts with (…, 1, 1). ``half``: b of
    the window M, or None for the whole spectrum. ``axes``: how many of the last axes are space. Raises UserError: the
    donors have another window.

    Example:
        >>> dark, bright = torch.full((4, 4), 0.25), torch.full((4, 4), 0.75)
        >>> interpolate_amplitudes(dark, low_frequencies(bright, 0), torch.tensor(0.5), half=0)[0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    sides = images.shape[-axes:]
    spectrum = _spectrum(images, axes)
    part = spectrum if half is None else _window(spectrum, sides, half)
    if donors.shape[-axes:] != part.shape[-axes:]:
        given, wanted = ("×".join(map(str, shape[-axes:])) for shape in (donors.shape, part.shape))
        raise UserError(
            f"amplitudes of {given} frequencies do not fit a window of {wanted}: spectra of images of different sizes "
            "cannot mix"
        )
    amplitudes = part.abs()
    directions = torch.where(amplitudes > 0, part / amplitudes, 1)
    change = rate * (donors - amplitudes) * directions
    if half is None:
        return images + _image(change, sides)
    # Nothing changes outside the window, so the inverse of the change alone is added.
    whole = torch.zeros_like(spectrum)
    whole[_places(sides, half, spectrum.device)] = change
    return images + _image(whole, sides)


def _spectrum(images: Tensor, axes: int) -> Tensor:
    spectrum: Tensor = torch.fft.rfftn(images, dim=tuple(range(-axes, 0)))
    return spectrum


def _image(spectrum: Tensor, sides: Sequence[int]) -> Tensor:
    image: Tensor = torch.fft.irfftn(spectrum, s=tuple(sides), dim=tuple(range(-len(sides), 0)))
    return image


def _window(spectrum: Tensor, sides: Sequence[int], half: int) -> Tensor:
    """The part of a half spectrum with |u| ≤ b and 0 ≤ v ≤ b, u in rising order."""
    if half < 0 or 2 * half + 1 > min(sides):
        size = "×".join(map(str, sides))
        raise UserError(f"a window of half-width {half} does not fit the spectrum of images of {size}")
    return spectrum[_places(sides, half, spectrum.device)]


def _places(sides: Sequence[int], half: int, device: torch.device) -> tuple[Any, ...]:
    """Where the window lies in a half spectrum, as an index."""
    rows = [torch.arange(-half, half + 1, device=device) % side for side in sides[:-1]]
    return (..., *torch.meshgrid(*rows, torch.arange(half + 1, device=device), indexing="ij"))
