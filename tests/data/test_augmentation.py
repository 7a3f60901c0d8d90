"""Augmentation against torchvision, piece by piece, and its invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedshift.data.domain import Preprocessing
from fedshift.data.transforms import (
    PRESETS,
    Augmentation,
    augment,
    augment_with_masks,
    preset,
    strong_view,
    to_network,
)
from fedshift.errors import UserError
from fedshift.functional import colour


def images(number: int = 6, channels: int = 3, size: int = 12, seed: int = 0) -> Tensor:
    return torch.rand(number, channels, size, size, generator=torch.Generator().manual_seed(seed))


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_nothing_on_changes_nothing_and_certain_greyscale_all() -> None:
    batch = images()
    assert augment(batch, Augmentation(), drawn()) is batch
    assert preset("none").is_identity
    assert not any(found.is_identity for name, found in PRESETS.items() if name != "none")
    out = augment(images(), Augmentation(greyscale=1.0), drawn())
    assert torch.equal(out[:, 0], out[:, 1])
    assert torch.equal(out[:, 0], out[:, 2])


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("channels", [1, 3])
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_range_shape_and_repeatability(name: str, channels: int, seed: int) -> None:
    batch = images(5, channels, seed=seed)
    before = batch.clone()
    first, second = augment(batch, preset(name), drawn(seed)), augment(batch, preset(name), drawn(seed))
    assert first.shape == batch.shape
    assert 0 <= first.min() <= first.max() <= 1
    assert torch.equal(first, second)
    assert torch.equal(batch, before)


def test_flips_are_those_of_torch() -> None:
    batch = images()
    assert torch.equal(augment(batch, Augmentation(flip=1.0), drawn()), batch.flip(-1))
    whole = Augmentation(flip=1.0, crop_scale=(1.0, 1.0))  # through the resampling: the crop is the whole image
    assert torch.allclose(augment(batch, whole, drawn()), batch.flip(-1), atol=1e-5)
    assert torch.allclose(augment(batch, Augmentation(crop_scale=(1.0, 1.0)), drawn()), batch, atol=1e-5)
    batch = images(400, 1, 4)
    out = augment(batch, Augmentation(flip=0.5), drawn(3))
    kept = (out == batch).flatten(1).all(1)
    assert 150 < kept.sum() < 250
    assert torch.equal(out[~kept], batch[~kept].flip(-1))
    batch = images()
    assert torch.equal(augment(batch, Augmentation(flip_vertical=1.0), drawn()), batch.flip(-2))
    both = Augmentation(flip=1.0, flip_vertical=1.0, crop_scale=(1.0, 1.0))
    assert torch.allclose(augment(batch, both, drawn()), batch.flip(-1, -2), atol=1e-5)


def test_a_crop_shows_part_of_the_image() -> None:
    """On a ramp, a crop of area share s and ratio r spans sqrt(s·r) of the range and stays a ramp inside it."""
    ramp = torch.linspace(0, 1, 64).expand(300, 1, 64, 64).contiguous()
    out = augment(ramp, Augmentation(crop_scale=(0.25, 0.25), crop_ratio=(1.0, 1.0)), drawn())
    span = out[:, 0, 32, -1] - out[:, 0, 32, 0]
    assert torch.allclose(span, torch.full_like(span, 0.5), atol=0.02)
    assert out[:, 0, 32, 0].max() > 0.4  # crops lie everywhere
    assert out[:, 0, 32, 0].min() < 0.1


@pytest.mark.parametrize("name", ["shear", "scale", "shift", "rotate", "cut_out"])
def test_each_change_is_bounded_and_alone(name: str) -> None:
    """A wider range with the same draws changes more; both of its neighbours leave the draws as they are."""
    most = {"rotate": 40.0}.get(name, 0.5)
    batch = images(8, size=16)
    little, much = (augment(batch, Augmentation.model_validate({name: share * most}), drawn()) for share in (0.2, 1))
    assert 0 < (little - batch).abs().mean() < (much - batch).abs().mean()
    assert torch.equal(augment(batch, Augmentation.model_validate({name: most}), drawn()), much)
    assert Augmentation.model_validate({name: most}).is_identity is False


def test_an_affine_change_within_a_crop() -> None:
    """A left half that is moved by half of its width: the right half of what is shown is what was its left half."""
    ramp = torch.linspace(0, 1, 64).expand(200, 1, 8, 64).contiguous()
    crop = Augmentation(crop_scale=(0.5, 0.5), crop_ratio=(0.5, 2.0))
    moved = crop.model_copy(update={"shift": 1e-6})
    assert torch.allclose(augment(ramp, crop, drawn(1)), augment(ramp, moved, drawn(1)), atol=1e-4)
    far = augment(ramp, crop.model_copy(update={"shift": 0.25}), drawn(1))[:, 0, 4, 32]
    near = augment(ramp, crop, drawn(1))[:, 0, 4, 32]
    width = augment(ramp, crop, drawn(1))[:, 0, 4, [0, 63]].diff().flatten()
    assert ((far - near).abs() <= 0.26 * width + 0.02).all()
    assert (far - near).abs().max() > 0.1


@pytest.mark.parametrize("policy", ["rand_augment", "trivial_augment", "augmix"])
def test_a_policy_is_torchvision_s(policy: str) -> None:
    """The same images as its transform with the same seed; repeatable, and torch's own generator is left alone."""
    transforms = pytest.importorskip("torchvision.transforms")
    kinds = {"rand_augment": "RandAugment", "trivial_augment": "TrivialAugmentWide", "augmix": "AugMix"}
    batch = (images(5, size=16) * 255).round() / 255
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = augment(batch, Augmentation.model_validate({"policy": policy}), drawn())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(int(torch.randint(2**62, (), generator=drawn())))
    transform = getattr(transforms, kinds[policy])()
    expected = torch.stack([transform((image * 255).to(torch.uint8)) for image in batch]).float() / 255
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert not torch.equal(found, batch)
    grey = augment(batch[:, :1], Augmentation.model_validate({"policy": policy}), drawn())
    assert grey.shape == (5, 1, 16, 16)
    assert 0 <= grey.min() <= grey.max() <= 1


def test_what_is_no_augmentation() -> None:
    with pytest.raises(UserError, match="cannot move masks"):
        augment_with_masks(images(), images(), Augmentation(policy="augmix"), drawn())
    with pytest.raises(UserError, match="did you mean 'csac'"):
        preset("csca")


def factor(value: float, number: int = 6) -> Tensor:
    return torch.full((number, 1, 1, 1), value)


@pytest.mark.parametrize("value", [0.6, 1.0, 1.4])
def test_colour_changes_agree_with_torchvision(value: float) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    batch = images()
    pairs = [
        (colour.adjust_brightness(batch, factor(value)), functional.adjust_brightness(batch, value)),
        (colour.adjust_contrast(batch, factor(value)), functional.adjust_contrast(batch, value)),
        (colour.adjust_saturation(batch, factor(value)), functional.adjust_saturation(batch, value)),
        (colour.grey(batch), functional.rgb_to_grayscale(batch)),
        (colour.adjust_contrast(batch[:, :1], factor(value)), functional.adjust_contrast(batch[:, :1], value)),
    ]
    for found, expected in pairs:
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("turn", [-0.4, -0.1, 0.0, 0.25, 0.5])
def test_hue_agrees_with_torchvision(turn: float) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    batch = images(size=16)
    batch[0] = 0.3  # grey has no hue
    batch[1, :, :4] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    assert torch.allclose(colour.adjust_hue(batch, factor(turn)), functional.adjust_hue(batch, turn), atol=1e-4)


def test_red_turned_by_a_third_is_green() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    assert torch.allclose(colour.adjust_hue(red, factor(1 / 3, 1)).flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-5)


def test_bounds() -> None:
    crops = [("crop_scale", (0.0, 1.0)), ("crop_scale", (0.9, 0.8)), ("crop_ratio", (2, 3))]
    for field, value in (*crops, ("flip", 1.2), ("hue", 0.6), ("shear", 1.0), ("scale", 1.0), ("rotate", -1)):
        with pytest.raises(ValidationError, match=field):
            Augmentation.model_validate({field: value})


def test_to_network_scales_and_normalises() -> None:
    stored = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 1, 2, 2).repeat(1, 3, 1, 1)
    preprocessing = Preprocessing(kind="image", mean=(0.0, 0.2, 0.4), std=(1.0, 0.5, 2.0))
    out = to_network(stored, preprocessing, "cpu")
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(out[0, 0].flatten(), torch.tensor([0.0, 0.2, 1.0, 0.4]))
    assert torch.allclose(out[0, 1].flatten(), torch.tensor([-0.4, 0.0, 1.6, 0.4]))
    features = torch.tensor([[1.0, 2.0]])
    assert torch.equal(to_network(features, Preprocessing(kind="features"), "cpu"), features)
    scaled = to_network(features, Preprocessing(kind="features", mean=(1.0, 1.0), std=(1.0, 0.5)), "cpu")
    assert scaled.tolist() == [[0.0, 2.0]]
    assert stored.dtype == torch.uint8


def test_a_strong_view_changes_the_pixels_that_were_stored() -> None:
    preprocessing = Preprocessing(kind="image", channels=3, size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    pixels = torch.rand(5, 3, 8, 8)
    mean, std = (torch.tensor(part).view(1, 3, 1, 1) for part in (preprocessing.mean, preprocessing.std))
    inputs = (pixels - mean) / std
    view = strong_view(inputs, Augmentation(), preprocessing, torch.Generator())
    torch.testing.assert_close(view, inputs, atol=1e-5, rtol=1e-5)

    # Greyscale of every image: three equal channels before normalisation, weighted sums of the stored ones.
    view = strong_view(inputs, Augmentation(greyscale=1.0), preprocessing, torch.Generator())
    grey = 0.2989 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2]
    back = view * std + mean
    for channel in range(3):
        torch.testing.assert_close(back[:, channel], grey, atol=2e-3, rtol=0)
    vectors, strong = torch.rand(3, 7), Augmentation(brightness=0.9)
    assert torch.equal(strong_view(vectors, strong, Preprocessing(kind="features"), torch.Generator()), vectors)
