"""What an attack on what sites send has found, once and over repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedshift.deploy.audit.gradient_search import Attack, Exchange

_LEVEL = 0.95


@dataclass(frozen=True)
class Case:
    """The result of one attack on one exchange of a site, or on the sum that secure aggregation shows of several.

    Each reconstruction is compared with the original that it resembles most, no original twice: of the mini-batches, or
    of all training samples for an epoch. Pixels are in [0, 1], features as the network reads them.

    Attributes:
        sites: how many sites are in the sum; 1 for what a single site sent.
        batch: samples in a mini-batch of a site.
        steps: optimiser steps behind what was sent, of all sites together; 0 for gradients.
        distance: the lowest distance between the gradients that a search reached.
        mse: mean squared error of each reconstruction.
        psnr: peak signal-to-noise ratio of each reconstruction in dB; None for feature vectors.
        ssim: structural similarity of each reconstruction; None for feature vectors.
        correlation: correlation of each reconstruction; None for images.
        guess_mse: what the sites' mean sample scores in place of every reconstruction; likewise the other ``guess_…``.
        labels: labels of the originals, in the order of the reconstructions.
        inferred: labels that the attacker inferred.
        labels_right: how many labels of the batch are right; None if more samples were behind what was sent than the
            attacker reconstructs.
        repeats: how many times the sites sent something else, and it was attacked.
        bounds: of the mean SSIM or correlation, 95 % bounds over the repeats (Student's t); None without repeats.
        originals: the originals, of the first repeat.
        reconstructions: the reconstructions, of the first repeat.
    """

    exchange: Exchange
    attack: Attack
    sites: int
    batch: int
    steps: int
    distance: float | None
    mse: tuple[float, ...]
    psnr: tuple[float, ...] | None
    ssim: tuple[float, ...] | None
    correlation: tuple[float, ...] | None
    guess_mse: float
    guess_psnr: float | None
    guess_ssim: float | None
    guess_correlation: float | None
    labels: tuple[str, ...]
    inferred: tuple[str, ...]
    labels_by: str
    labels_right: int | None
    seconds: float
    originals: npt.NDArray[np.float32] = field(repr=False)
    reconstructions: npt.NDArray[np.float32] = field(repr=False)
    repeats: int = 1
    bounds: tuple[float, float] | None = None

    @property
    def likeness(self) -> tuple[float, ...]:
        """SSIM of images, correlation of vectors."""
        likeness = self.correlation if self.ssim is None else self.ssim
        assert likeness is not None
        return likeness

    def record(self) -> dict[str, Any]:
        """Plain data without the samples. Infinite numbers, such as the PSNR of an exact copy, are None."""
        return {key: _plain(value) for key, value in vars(self).items() if key not in ("originals", "reconstructions")}


def together(repeats: Sequence[Case]) -> Case:
    """One case of several of the same attack: all reconstructions, and how sure their mean likeness is.

    Reconstructions of one repeat are not independent, so the bounds are those of the means of the repeats.
    """
    first = repeats[0]
    if len(repeats) == 1:
        return first
    joined: dict[str, Any] = {}
    for name in ("mse", "psnr", "ssim", "correlation", "labels", "inferred"):
        if getattr(first, name) is not None:
            joined[name] = tuple(value for case in repeats for value in getattr(case, name))
    for name in ("guess_mse", "guess_psnr", "guess_ssim", "guess_correlation"):
        if getattr(first, name) is not None:
            joined[name] = fmean(getattr(case, name) for case in repeats)
    right = [case.labels_right for case in repeats if case.labels_right is not None]
    distances = [case.distance for case in repeats if case.distance is not None]
    means = [fmean(case.likeness) for case in repeats]
    half = float(stats.t.ppf((1 + _LEVEL) / 2, len(means) - 1) * stats.sem(means))
    return replace(
        first,
        **joined,
        distance=fmean(distances) if distances else None,
        labels_right=sum(right) if right else None,
        seconds=sum(case.seconds for case in repeats),
        repeats=len(repeats),
        bounds=(fmean(means) - half, fmean(means) + half),
    )


def _plain(value: Any) -> Any:
    """A value for JSON: tuples as lists, and None for infinite numbers and NaN."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
