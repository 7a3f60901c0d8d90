"""Strong views: what is changed are the pixels that were stored, and what comes out is normalised once."""

from __future__ import annotations

import torch

from fedshift.data.domain import Preprocessing
from fedshift.data.transforms import Augmentation, strong_view


def test_a_view_that_changes_nothing_gives_the_inputs_back() -> None:
    preprocessing = Preprocessing(kind="image", channels=3, size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    pixels = torch.rand(5, 3, 8, 8)
    mean, std = (torch.tensor(part).view(1, 3, 1, 1) for part in (preprocessing.mean, preprocessing.std))
    inputs = (pixels - mean) / std
    view = strong_view(inputs, Augmentation(), preprocessing, torch.Generator())
    torch.testing.assert_close(view, inputs, atol=1e-5, rtol=1e-5)


def test_a_grey_view_has_the_luminance_of_the_pixels() -> None:
    """Greyscale of every image: three equal channels before normalisation, weighted sums of the stored ones."""
    preprocessing = Preprocessing(kind="image", channels=3, size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    pixels = torch.rand(4, 3, 8, 8)
    mean, std = (torch.tensor(part).view(1, 3, 1, 1) for part in (preprocessing.mean, preprocessing.std))
    view = strong_view((pixels - mean) / std, Augmentation(greyscale=1.0), preprocessing, torch.Generator())
    grey = 0.2989 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2]
    back = view * std + mean
    for channel in range(3):
        torch.testing.assert_close(back[:, channel], grey, atol=2e-3, rtol=0)


def test_vectors_have_no_strong_view() -> None:
    inputs = torch.rand(3, 7)
    strong = Augmentation(brightness=0.9)
    assert torch.equal(strong_view(inputs, strong, Preprocessing(kind="features"), torch.Generator()), inputs)
