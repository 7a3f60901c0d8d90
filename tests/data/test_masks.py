"""Images with masks: the generated set, people's own folders, and what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.builders.discs_and_cups import CAMERAS, DiscsAndCups
from fedshift.data.builders.mask_folder import MaskFolder, mask_file
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, Domain
from fedshift.data.site_data import SiteData
from fedshift.data.transforms import Augmentation, augment, augment_with_masks
from fedshift.errors import UserError
from fedshift.experiment.environment import data_fingerprint


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


def small(**options: int) -> DataSet:
    return DiscsAndCups(**{"per_site": 3, "size": 32, **options}).build()


# Generated ------------------------------------------------------------------------------------------------------------


def test_generated_images() -> None:
    assert data_fingerprint(small()) == data_fingerprint(small())
    assert data_fingerprint(small()) != data_fingerprint(small(base_seed=1))
    longer = small(per_site=4)
    for name, domain in small().domains.items():
        np.testing.assert_array_equal(longer.domains[name].inputs[:3], domain.inputs)
    data = small(per_site=8, size=64)
    assert data.task == "segmentation"
    assert data.classes == ("cup", "disc")
    assert tuple(data.domains) == tuple(CAMERAS)
    for domain in data.domains.values():
        cup, disc = domain.masks[:, 0].astype(bool), domain.masks[:, 1].astype(bool)
        assert not (cup & ~disc).any()
        assert (cup.mean((1, 2)) > 0.01).all()
        assert (disc.mean((1, 2)) < 0.35).all()
        green = domain.inputs[:, 1].astype(float)
        assert green[cup].mean() > green[disc & ~cup].mean() + 5  # of single images not, where a vessel covers the cup
        assert all(green[index][disc[index]].mean() > green[index][~disc[index]].mean() + 15 for index in range(8))
    domains = small(per_site=40).domains.values()
    colours = np.array([domain.inputs.mean((0, 2, 3)) for domain in domains])  # type: ignore[union-attr]
    sizes = np.array([domain.masks.mean((0, 2, 3)) for domain in domains])  # type: ignore[union-attr]
    assert np.ptp(colours, axis=0).min() > 30
    assert np.ptp(sizes, axis=0).max() < 0.03
    masks = [mask.tobytes() for domain in small().domains.values() for mask in np.asarray(domain.masks)]
    assert len(set(masks)) == len(masks)


# A site's view --------------------------------------------------------------------------------------------------------


def view(augmentation: Augmentation | None = None) -> SiteData:
    data = small()
    parts = [(domain, np.arange(2), number) for number, domain in enumerate(data.domains.values())]
    return SiteData(parts, data.preprocessing, augmentation)


def test_batches_have_masks_that_colours_and_styles_leave_alone() -> None:
    site = view()
    inputs, masks, _ = site.batch(torch.tensor([0, 3, 7]))
    assert inputs.shape == (3, 3, 32, 32)
    assert masks.shape == (3, 2, 32, 32)
    assert masks.dtype == torch.float32
    domains = list(small().domains.values())
    for row, (domain, index) in enumerate([(domains[0], 0), (domains[1], 1), (domains[3], 1)]):
        np.testing.assert_array_equal(masks[row].numpy(), domain.masks[index])
    plain, same, _ = site.batch(torch.tensor([0, 3, 7]), torch.Generator())
    assert torch.equal(plain, inputs)
    assert torch.equal(same, masks)
    site = view(Augmentation(brightness=0.4, contrast=0.4, hue=0.2))
    inputs, masks, _ = site.batch(torch.arange(6), torch.Generator().manual_seed(0))
    plain, same, _ = site.batch(torch.arange(6))
    assert torch.equal(masks, same)
    assert not torch.equal(inputs, plain)
    augmentation, rows = Augmentation(crop_scale=(0.5, 1.0), flip=0.5), torch.arange(6)
    plain, masks, _ = view(augmentation).batch(rows, torch.Generator().manual_seed(3))
    negative = view(augmentation).with_restyle(lambda images, rows, generator: 1 - images)
    inputs, turned, _ = negative.batch(rows, torch.Generator().manual_seed(3))
    assert torch.equal(turned, masks)
    torch.testing.assert_close(inputs, -plain)  # prepared with mean and deviation of one half
    still = view().with_restyle(lambda images, rows, generator: 1 - images)
    unmoved = still.batch(rows, torch.Generator())[1]
    assert torch.equal(unmoved, view().batch(rows)[1])
    assert not torch.equal(unmoved, masks)


def test_image_and_mask_move_together() -> None:
    """A mask drawn into the image as a fourth colour is still the mask after any crop and mirror."""
    masks = torch.from_numpy(np.concatenate([domain.masks for domain in small().domains.values()])).float()  # type: ignore[misc]
    images = masks.repeat(1, 2, 1, 1)[:, :3]
    augmentation = Augmentation(crop_scale=(0.5, 1.0), flip=0.5)
    moved, turned = augment_with_masks(images, masks, augmentation, torch.Generator().manual_seed(3))
    assert not torch.equal(turned, masks)
    assert set(turned.unique().tolist()) == {0.0, 1.0}
    assert torch.equal((moved[:, :2] > 0.5).float(), turned)
    alone = augment(images, augmentation, torch.Generator().manual_seed(3))
    torch.testing.assert_close(alone, moved)


# People's own folders -------------------------------------------------------------------------------------------------


def write(root: Path, site: str, name: str, size: tuple[int, int] = (20, 16), colour: bool = True) -> None:
    draw = np.random.default_rng(sum(f"{site}{name}".encode()))
    shape = (size[1], size[0], 3) if colour else (size[1], size[0])
    image = root / site / "images" / f"{name}.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(image)
    for structure, value in (("cup", 255), ("disc", 1)):
        mask = np.zeros((size[1], size[0]), dtype=np.uint8)
        mask[4:10, 5:12] = value
        file = root / site / "masks" / structure / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for site in ("a", "b"):
        for name in ("one", "two"):
            write(tmp_path / "own", site, name)
    return tmp_path / "own"


def test_own_folders_and_their_scale(root: Path) -> None:
    data = MaskFolder(root=root, size=16).build()
    assert data.task == "segmentation"
    assert data.classes == ("cup", "disc")
    for domain in data.domains.values():
        assert domain.inputs.shape == (2, 3, 16, 16)
        assert domain.masks.shape == (2, 2, 16, 16)
        expected = np.zeros((16, 16), dtype=np.uint8)
        expected[4:10, 3:10] = 1  # 20 × 16 pixels, two columns cut off at each side
        np.testing.assert_array_equal(domain.masks[0, 0], expected)
        np.testing.assert_array_equal(domain.masks[0, 1], expected)
    for name, scale in (("one", 2), ("two", 3)):
        write(root, "b", name, (20 * scale, 16 * scale))
        for structure in ("cup", "disc"):
            mask = np.zeros((16 * scale, 20 * scale), dtype=np.uint8)
            mask[4 * scale : 10 * scale, 5 * scale : 12 * scale] = 7
            Image.fromarray(mask).save(root / "b" / "masks" / structure / f"{name}.png")
    data = MaskFolder(root=root, size=16).build()
    np.testing.assert_array_equal(data.domains["a"].masks, data.domains["b"].masks)


def break_colour(root: Path) -> None:
    for name in ("one", "two"):
        write(root, "b", name, colour=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda at: Image.new("L", (20, 17)).save(at / "b/masks/cup/two.png"),
            r"mask \S*b/masks/cup/two\.png is 20×17 pixels, its image 20×16",
        ),
        (
            lambda at: (at / "b/masks/disc/one.png").unlink(),
            r"image \S*b/images/one\.png has no mask: expected \S*b/masks/disc/one\.png",
        ),
        (
            lambda at: (at / "a/images/two.png").unlink(),
            r"mask \S*a/masks/\w+/two\.png has no image of that name in \S*a/images",
        ),
        (
            lambda at: (at / "b/masks/disc").rename(at / "b/masks/disk"),
            r"folders of masks differ between sites: 'a' has \[cup, disc\]; 'b' has \[cup, disk\]",
        ),
        (lambda at: shutil.rmtree(at / "b/masks/disc"), r"site 'b' has no masks of 'disc'"),
        (break_colour, r"site 'a' has images in colour, site 'b' in grey: set data\.colour"),
        (
            lambda at: Image.new("RGB", (20, 16)).save(at / "a/images/one.jpg"),
            r"one\.png and \S*one\.jpg have the same name",
        ),
        (lambda at: (at / "a/masks/cup/one.png").write_bytes(b"no image"), r"cup/one\.png does not decode"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(root: Path, fault, message: str) -> None:  # type: ignore[no-untyped-def]
    fault(root)
    with pytest.raises(UserError, match=message) as caught:
        MaskFolder(root=root, size=16).build()
    assert "\n" not in str(caught.value)


def test_grey_and_colour_when_somebody_says_how(root: Path) -> None:
    break_colour(root)
    assert MaskFolder(root=root, size=16, colour=True).build().input_shape == (3, 16, 16)
    assert MaskFolder(root=root, size=16, colour=False).build().input_shape == (1, 16, 16)


def test_folders_and_masks_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; expected root/<site>/images"):
        MaskFolder(root=tmp_path / "none").build()
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="site 'a' is empty: no images"):
        MaskFolder(root=tmp_path / "empty").build()
    data = small()
    north = data.domains["north"]
    cut = Domain("north", north.inputs, north.labels, masks=north.masks[..., :-1])
    with pytest.raises(
        UserError, match=r"site 'north': masks are uint8 \(3, 2, 32, 31\), expected uint8 \(3, 2, 32, 32\)"
    ):
        check_dataset(DataSet("x", {**data.domains, "north": cut}, data.classes, data.preprocessing, data.manifest))
    bare = Domain("north", north.inputs, north.labels)
    with pytest.raises(UserError, match="site 'east' has masks, site 'north' has none"):
        check_dataset(DataSet("x", {**data.domains, "north": bare}, data.classes, data.preprocessing, data.manifest))


@pytest.mark.parametrize("name", ["../disc/eye.png", "a/../../disc/eye.png", "../../eye.png"])
def test_a_predicted_mask_lies_below_its_structure(tmp_path: Path, name: str) -> None:
    assert mask_file(tmp_path, "cup", "left/eye.jpg") == tmp_path / "cup" / "left" / "eye.png"
    with pytest.raises(UserError, match="would be written outside"):
        mask_file(tmp_path, "cup", name)
