"""FedDG-ELCFS on volumes with masks: the meta loss by loops over voxels, its gradient by differences, and copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import data_set

from fedshift.data.builders.scanned_balls import ScannedBalls
from fedshift.data.domain import Preprocessing
from fedshift.errors import UserError
from fedshift.functional.spectra import low_frequencies
from fedshift.methods.base import Samples
from fedshift.methods.federated.elcfs import ELCFS, _Bank

INNER, WEIGHT, TEMPERATURE = 0.3, 0.4, 0.3
assert data_set  # the tiny sites lie beside these tests


def test_copies_have_the_amplitudes_of_another_site() -> None:
    """A site's volumes in another scanner's look: NumPy's whole transform, cut to the range of voxels."""
    data = ScannedBalls(size=16, per_site=3).build()
    own, other = (np.asarray(data.domains[site].inputs)[:1] / 255 for site in ("north", "east"))
    method = ELCFS(window=0.1, rates="released", copies="all")
    window = low_frequencies(torch.from_numpy(other), 1, axes=3)
    grey = Preprocessing(kind="features", mean=(0.5,), std=(0.5,))
    site: Any = SimpleNamespace(
        memory={"bank": {"east": {"amplitude": window}}}, device="cpu", generator_for=lambda _: torch.Generator(),
        pixels=lambda inputs: inputs * 0.5 + 0.5, inputs_of=lambda pixels: (pixels - 0.5) / 0.5, preprocessing=grey,
    )  # fmt: skip
    copies = _Bank(method, site).copies((torch.from_numpy(own) - 0.5) / 0.5) * 0.5 + 0.5
    whole, donor = (np.fft.fftn(values[0, 0]) for values in (own, other))
    mixed = np.abs(whole)
    for place in np.ndindex(3, 3, 3):
        at = tuple(part - 1 for part in place)
        mixed[at] = np.abs(donor)[at]
    wanted = np.real(np.fft.ifftn(mixed * np.exp(1j * np.angle(whole)))).clip(0, 1)
    np.testing.assert_allclose(copies[0, 0].numpy(), wanted, atol=1e-6)
    assert abs(copies.mean() - other.mean()) < 0.02 < abs(own.mean() - other.mean())


def test_volumes_that_are_no_pixels_and_parts_are_refused_in_one_line() -> None:
    for samples, message in (
        (Samples((1, 8, 8, 8), are_pixels=False), "store them as uint8"),
        (Samples((1, 8, 8, 8), parts=True), r"leave out data\.patch"),
        (Samples((5,)), "not images"),
    ):
        with pytest.raises(UserError, match=message):
            ELCFS().check_samples(samples)
