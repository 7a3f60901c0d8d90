"""PARDON: what a style is measured of, who gets it, and images in it. A step is compared in `test_styles_of_others`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lost import site_of
from tiny import CNN, NORMED_CNN, domains, federation, images, run, start_of
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.messages import Styles
from fedshift.methods.base import Samples
from fedshift.methods.federated.pardon import Pardon, common_style
from fedshift.methods.rounds import start_run
from fedshift.models.networks.cnn import MnistCnn

SIZES = {"a": 9, "b": 17, "c": 23}


def test_one_style_of_a_site_leaves_it_and_one_of_all_comes_back() -> None:
    method, found = Pardon(style_space="pixel"), domains(CNN, SIZES)
    where = federation(method, found, rounds=2)
    state = start_run(method, where, start_of(method, found))
    sent = {site: method.share_style(site_of(where, site)).styles for site in SIZES}
    assert {tuple(value.shape) for styles in sent.values() for value in styles.values()} == {(1, 1)}
    common = cast(Styles, state.parts["style"])
    assert common == common_style([sent[site] for site in SIZES])
    state = method.round(where, state)
    assert state.parts["style"] == common
    method.round(where, state)
    where.settle()
    assert where.ledger.total["up"]["styles"] == 3 * 2 * 4
    assert where.ledger.total["down"]["styles"] == 2 * 3 * 2 * 4  # in both rounds


def test_groups_and_not_images_count_the_same() -> None:
    """Nine images of one kind and two of another: the site's style lies halfway."""
    rows = torch.arange(12 * 12).reshape(1, 12, 12) % 5
    bright, dark = rows / 10 + 0.5, rows.flip(2) / 10
    stack = torch.stack([bright] * 9 + [dark] * 2)
    site: Any = SimpleNamespace(
        samples=11,
        scratch={},
        generator_for=lambda purpose: torch.Generator().manual_seed(0),
        data=SimpleNamespace(stored_rows=lambda some: stack[some], input_shape=(1, 12, 12)),
    )
    style = Pardon(style_space="pixel").share_style(site).styles
    torch.testing.assert_close(style["mean"][0], (bright.mean() + dark.mean())[None] / 2)
    squares = (bright.square().mean() + dark.square().mean()) / 2
    expected = (squares - style["mean"][0].square() + 1e-5).sqrt()
    torch.testing.assert_close(style["deviation"][0], expected)
    one = Pardon(style_space="pixel", style_images=1).share_style(site).styles["mean"]
    assert any(torch.allclose(one, image.mean()) for image in (bright, dark))


def test_pixels_in_the_common_style_stay_pixels() -> None:
    network = MnistCnn(channels=(3, 4), hidden=6).build((1, 12, 12), 3)
    site = site_of(federation(Pardon(), domains(CNN, SIZES)), "a")
    seen: list[Tensor] = []
    network.features.register_forward_pre_hook(lambda _module, given: seen.append(site.pixels(given[0])))
    style = Styles({"mean": torch.full((1, 1), 0.9), "deviation": torch.ones(1, 1)})
    Pardon(style_space="pixel")._styled_features(site, network, style)(site.data.batch(torch.arange(6))[0])
    assert seen[0].max() == pytest.approx(1, abs=1e-6)
    assert seen[0].min() >= -1e-6


def test_a_batch_of_one_class_has_no_triplets() -> None:
    method = Pardon(contrast_weight=1e3, norm_weight=0)
    site = site_of(federation(method, domains(CNN, SIZES)), "a")
    network = MnistCnn(channels=(3, 4), hidden=6).build((1, 12, 12), 3)
    style = Styles({"mean": torch.zeros(1, 3), "deviation": torch.ones(1, 3)})
    batch = next(iter(site.all_batches()))
    loss = method.styled_loss(site, network, style)
    same = batch.part((batch.targets == 0).nonzero().flatten())
    plain = torch.nn.functional.cross_entropy(network(same.inputs), same.targets)
    torch.testing.assert_close(loss(same), plain)
    assert loss(batch) > 10


def test_styles_of_features_are_of_the_common_start_that_predicts() -> None:
    method, found = Pardon(), domains(NORMED_CNN, SIZES)
    where = federation(method, found, NORMED_CNN)
    site = site_of(where, "a")
    before = method.share_style(site).styles
    model = site.model().eval()
    with torch.no_grad():
        maps = model.with_stages(site.data.batch(torch.arange(9))[0], ("conv1",))[1]["conv1"]
    assert before["mean"].shape == (1, maps.shape[1])
    lowest, highest = maps.mean((2, 3)).amin(0), maps.mean((2, 3)).amax(0)
    assert ((before["mean"][0] >= lowest - 1e-5) & (before["mean"][0] <= highest + 1e-5)).all()


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [({}, (5,), "pardon"), ({"style_space": "lab"}, (1, 8, 8), "lab needs colour images")],
)
def test_what_does_not_fit_is_said_before_the_run(options: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pardon(**options).check_samples(Samples(shape))
    Pardon(**options).check_samples(Samples((3, 8, 8)))


def test_a_stage_or_a_file_that_is_missing_is_said_before_the_run() -> None:
    network = MnistCnn(channels=(3, 4), hidden=6).build((1, 12, 12), 3)
    with pytest.raises(UserError, match="no stage 'conv9'"):
        Pardon(stage="conv9").check(network)
    with pytest.raises(UserError, match="style_space"):
        Pardon(setting="vgg", vgg_encoder="missing.safetensors").check(network)


def test_colour_images_may_take_it_in_lab() -> None:
    found = [images("a", 9, channels=3), images("b", 7, channels=3)]
    options = {"contrast_weight": 5.0}
    lab, pixel = (run(Pardon(style_space=space, **options), found, rounds=1)[0].weights for space in ("lab", "pixel"))
    assert lab != pixel
