"""PARDON: what a style is measured of, who gets it, and images in it. A step is compared in `test_styles_of_others`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lost import lose, site_of
from tiny import CNN, NORMED_CNN, domains, federation, images, run, start_of
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.messages import Styles
from fedshift.federation.site import Envelope
from fedshift.functional.styles import channel_styles
from fedshift.methods.base import Samples
from fedshift.methods.federated.pardon import Pardon, common_style
from fedshift.methods.rounds import start_run
from fedshift.models.networks.cnn import MnistCnn

SIZES = {"a": 9, "b": 17, "c": 23}


def style_of(*numbers: float) -> Styles:
    return Styles({"mean": torch.tensor([numbers]), "deviation": torch.tensor([numbers]) + 1})


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


def test_the_common_style_is_the_median_of_groups() -> None:
    """Two sites of one look count once; of two groups the lower median is taken, number by number."""
    pair, other = [style_of(1.0, 9.0), style_of(1.2, 9.2)], [style_of(9.0, 1.0), style_of(9.4, 1.0)]
    common = common_style([*pair, *other])
    torch.testing.assert_close(common["mean"], torch.tensor([[1.1, 1.0]]))
    torch.testing.assert_close(common["deviation"], torch.tensor([[2.1, 2.0]]))
    assert common_style(pair[:1]) == pair[0]


@pytest.mark.parametrize(("space", "channels"), [("pixel", 1), ("feature", 3)])
def test_images_take_the_common_style_by_their_share(space: str, channels: int) -> None:
    network = MnistCnn(channels=(3, 4), hidden=6).build((1, 12, 12), 3)
    site = site_of(federation(Pardon(), domains(CNN, SIZES)), "a")
    inputs = site.data.batch(torch.arange(6))[0]
    seen: list[Tensor] = []
    reader, plain = {
        "pixel": (network.features, site.pixels(inputs)),
        "feature": (network.get_submodule("features.conv2"), network.with_stages(inputs, ("conv1",))[1]["conv1"]),
    }[space]
    reader.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    style = Styles({"mean": torch.full((1, channels), 0.45), "deviation": torch.full((1, channels), 0.05)})
    for strength in (1.0, 0.25):
        Pardon(style_space=space, strength=strength)._styled_features(site, network, style)(inputs)  # type: ignore[arg-type]
        found = site.pixels(seen[-1]) if space == "pixel" else seen[-1]
        own = channel_styles(plain)[0]
        torch.testing.assert_close(channel_styles(found)[0], own + strength * (0.45 - own), atol=2e-3, rtol=0)


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


def test_without_any_style_images_stay_as_they_are() -> None:
    method = Pardon()
    where = federation(method, domains(CNN, SIZES), rounds=2, budget=9)
    site = site_of(where, "a")
    site.begin(Envelope(1, 1, 0.0, 9))
    weights = start_of(method, domains(CNN, SIZES))
    assert method.fit_styled(site, weights, {}).loss > 0
    lose(where, "b")
    state = start_run(method, where, weights)
    assert set(method.round(where, state).report["losses"]) == {"a", "c"}


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
