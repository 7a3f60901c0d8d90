"""Dice and HD95 of masks: numbers by hand, SciPy's distances and MONAI's functions as references, invariants."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.distance import cdist, directed_hausdorff

from fedshift.evaluation.mask_metrics import dice, hd95


def blob(seed: int, size: int = 20) -> Any:
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(1, 1, size, size)), (0, 0, 2, 2))
    return noise > 0.1


def square(top: int, left: int, side: int, size: int = 12) -> Any:
    mask = np.zeros((1, 1, size, size), dtype=bool)
    mask[..., top : top + side, left : left + side] = True
    return mask


def ball(radius: float, side: int = 41) -> Any:
    axes = np.stack(np.meshgrid(*[np.arange(side) - side // 2] * 3, indexing="ij"))
    return (np.linalg.norm(axes, axis=0) <= radius)[None, None]


def test_masks_by_hand() -> None:
    a, b = square(2, 2, 4), square(2, 4, 4)  # 8 of 16 pixels in common, moved by 2
    assert dice(a, b).item() == 50
    assert hd95(a, b).item() == 2
    assert hd95(square(0, 0, 1), square(3, 4, 1)).item() == 5
    # Volumes are as r³, and surfaces of balls around one centre are as far apart as their radii differ.
    large, small = ball(16), ball(10)
    assert dice(large, small).item() == pytest.approx(200 * 10**3 / (10**3 + 16**3), rel=0.01)
    assert hd95(large, small).item() == pytest.approx(6, abs=0.5)
    assert hd95(large, large).item() == 0
    empty = np.zeros((1, 1, 12, 12), dtype=bool)
    assert dice(empty, empty).item() == 100
    assert hd95(empty, empty).item() == 0
    assert dice(empty, square(0, 0, 3)).item() == 0
    assert hd95(empty, square(0, 0, 3)).item() == pytest.approx(11 * math.sqrt(2))
    assert hd95(np.zeros((1, 1, 5, 5, 5), bool), np.ones((1, 1, 5, 5, 5), bool)).item() == pytest.approx(4 * 3**0.5)
    a = np.concatenate([square(0, 0, 4), square(4, 4, 4)])
    both = np.concatenate([a, square(0, 0, 4).repeat(2, axis=0)], axis=1)
    assert dice(both, both[:, ::-1]).shape == (2, 2)
    assert dice(both, both[:, ::-1]).tolist() == [[100, 100], [0, 0]]
    with pytest.raises(ValueError, match="shape"):
        dice(square(0, 0, 2), square(0, 0, 2, size=13))
    with pytest.raises(ValueError, match="no images"):
        hd95(square(0, 0, 2)[:0], square(0, 0, 2)[:0])


@given(st.integers(0, 999), st.integers(0, 999))
@settings(max_examples=40)
def test_against_scipy_and_monai(one: int, other: int) -> None:
    metrics = pytest.importorskip("monai.metrics")  # takes seconds, in every process that collects tests
    a, b = blob(one), blob(other)
    contours = [np.argwhere(mask[0, 0] & ~ndimage.binary_erosion(mask[0, 0])) for mask in (a, b)]
    if all(len(points) for points in contours):
        apart = cdist(*contours)
        ways = [np.percentile(apart.min(axis), 95) for axis in (0, 1)]
        assert hd95(a, b).item() == pytest.approx(max(ways), abs=1e-5)
        assert hd95(a, b).item() <= max(directed_hausdorff(*contours)[0], directed_hausdorff(*contours[::-1])[0]) + 1e-5
        masks = [torch.from_numpy(mask).float() for mask in (a, b)]
        assert dice(a, b).item() == pytest.approx(100 * metrics.compute_dice(*masks).item(), rel=1e-6)
    assert hd95(a, b) == hd95(b, a)
    assert hd95(a, a).item() == 0
    assert dice(a, b) == dice(b, a)
    assert dice(a, a).item() == 100
    assert 0 <= dice(a, b).item() <= 100


ALONE = """
import sys
import numpy as np
from fedshift.extras import runs_program
from fedshift.evaluation.mask_metrics import hd95

runs_program("test")
draws = np.random.default_rng(0)
print(hd95(*(draws.random((2, 2, 7, 8, 9)) > 0.9 for _ in "ab")).tolist())
import monai
print("monai.networks.nets" in sys.modules, "transformers" in sys.modules)
print(monai.losses.DiceLoss.__name__, monai.apps.download_url.__name__, "nothing" in dir(monai))
"""


@pytest.mark.slow  # another process imports torch and MONAI
def test_a_program_imports_the_metrics_of_monai_alone() -> None:
    """With the same numbers. What else somebody uses of MONAI comes when it is used."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    numbers, loaded, used = done.stdout.splitlines()
    draws = np.random.default_rng(0)
    masks = [draws.random((2, 2, 7, 8, 9)) > 0.9 for _ in "ab"]
    metrics = pytest.importorskip("monai.metrics")
    whole = metrics.compute_hausdorff_distance(
        *(torch.from_numpy(mask).float() for mask in masks), include_background=True, percentile=95
    )
    assert numbers == str(whole.double().tolist())
    assert loaded == "False False"
    assert used == "DiceLoss download_url False"
