"""StableFDG: whose style a site takes, and what a mini-batch becomes. A step is compared in `test_styles_of_others`."""

from __future__ import annotations

import pytest
import torch
from lost import lose, site_of
from tiny import CNN, NORMED_CNN, domains, federation, run
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.messages import Styles
from fedshift.federation.site import Envelope
from fedshift.methods.base import Samples
from fedshift.methods.federated.stablefdg import StableFDG, Styled, _stages
from fedshift.models.networks.cnn import MnistCnn
from fedshift.models.networks.mlp import Mlp

SIZES = {"a": 9, "b": 17, "c": 1}


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def maps_of(number: int) -> Tensor:
    return torch.randn(number, 3, 4, 4, generator=draws(1)).abs()


def test_a_site_takes_the_style_of_another_which_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    method, taken = StableFDG(attention_size=2), list[Styles | None]()
    plain = StableFDG.styled_loss
    monkeypatch.setattr(
        StableFDG,
        "styled_loss",
        lambda self, site, model, other: (taken.append(other), plain(self, site, model, other))[1],
    )
    where = federation(method, domains(CNN, SIZES), rounds=20, budget=99)
    weights = run(method, domains(CNN, SIZES), rounds=1, budget=0)[0].weights
    bank = {site: method.share_styles(site_of(where, site), weights).styles for site in SIZES}
    assert {tuple(value.shape) for styles in bank.values() for value in styles.values()} == {(2, 3)}
    taken.clear()
    site = site_of(where, "a")
    for number in range(1, 12):
        site.begin(Envelope(number, number, 0.0, 9))
        method.fit_styled(site, weights, bank)
    assert {id(style) for style in taken} == {id(bank["b"]), id(bank["c"])}
    taken.clear()
    method.fit_styled(site, weights, {"a": bank["a"]})
    assert taken == [None]


def test_styles_of_a_site_that_is_lost_are_missing() -> None:
    method = StableFDG(attention_size=2)
    where = federation(method, domains(CNN, SIZES), rounds=2, budget=9)
    state = run(method, domains(CNN, SIZES), rounds=1, budget=0)[0]
    lose(where, "b", "c")
    assert set(method.round(where, state).report["losses"]) == {"a"}


def test_half_of_the_maps_take_the_other_s_style() -> None:
    mean = torch.tensor([[7.0, 8.0, 9.0], [2.0, 3.0, -1.0]])
    other = Styles({"mean": mean, "deviation": torch.full((2, 3), 1e-9)})
    styled = Styled(StableFDG(sharing=1), draws(), torch.arange(5), other)
    maps = maps_of(5)
    shared = styled.share(maps)
    torch.testing.assert_close(shared[3:].mean((2, 3)), mean[:1].expand(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(shared[3:].std((2, 3)), torch.tensor([[2.0, 3.0, 0.0]]).expand(2, 3), atol=1e-4, rtol=0)
    own = maps.mean((2, 3))
    assert (shared[:3].mean((2, 3)).amin(0) >= own.amin(0) - 1e-5).all()  # centres lie among the batch's own styles
    assert (shared[:3].mean((2, 3)).amax(0) <= own.amax(0) + 1e-5).all()
    torch.testing.assert_close(styled.share(maps[:1]).std(), maps[:1].std(), atol=1e-5, rtol=0)


def test_equal_images_keep_their_style() -> None:
    other = Styles({"mean": torch.ones(2, 3), "deviation": torch.ones(2, 3)})
    maps = maps_of(1).expand(6, 3, 4, 4)
    shared = Styled(StableFDG(sharing=1), draws(), torch.zeros(6), other).share(maps)
    torch.testing.assert_close(shared[:3], maps[:3], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("added", "frequent"), [(0.0, [5, 2, 1]), (0.5, [5, 4, 3]), (1.0, [6, 5, 5])])
def test_the_rarest_classes_are_added_once(added: float, frequent: list[int]) -> None:
    labels = torch.tensor([0, 0, 1, 0, 2, 0, 1, 0])
    styled = Styled(StableFDG(exploring=1, added=added), draws(), labels, None)
    maps = styled.explore(maps_of(8))
    assert torch.bincount(styled.labels).sort(descending=True).values.tolist() == frequent
    assert torch.equal(styled.labels[:8], labels)
    assert len(maps) == len(styled.labels) == len(styled.explore(maps)) == len(styled.labels)


def test_nothing_changes_where_nothing_happens_or_the_model_predicts() -> None:
    network = StableFDG().adapt_network(MnistCnn(channels=(3, 4), hidden=6).build((1, 16, 16), 3), 1)
    assert list(_stages(network)) == ["conv1", "conv2"]
    images = torch.rand(4, 1, 16, 16, generator=draws())
    labels = torch.arange(4) % 3
    plain = network(images)
    with Styled(StableFDG(exploring=0, sharing=0), draws(), labels, None).attach(network) as styled:
        assert torch.equal(network(images), plain)
    assert styled.labels is labels
    with Styled(StableFDG(exploring=1), draws(), labels, None).attach(network) as styled:
        assert len(network(images)) == 8
    assert torch.equal(network(images), plain)


def test_it_needs_images_and_two_stages_of_maps() -> None:
    with pytest.raises(UserError, match="stablefdg"):
        StableFDG().check_samples(Samples((5,)))
    with pytest.raises(UserError, match="two stages of maps"):
        StableFDG().adapt_network(Mlp().build((5,), 3), 1)


def test_styles_that_leave_are_of_a_model_that_predicts() -> None:
    """Batches of 8 and of 1: what BatchNorm measures in them would be another style."""
    method = StableFDG(attention_size=2)
    where = federation(method, domains(NORMED_CNN, SIZES), NORMED_CNN, rounds=2, budget=9)
    state, _ = run(method, domains(NORMED_CNN, SIZES), NORMED_CNN, rounds=1, budget=0)
    site = site_of(where, "a")
    model = site.model(state.weights).eval()
    with torch.no_grad():
        inputs = torch.cat([batch.inputs for batch in site.all_batches()])
        maps = model.with_stages(inputs, ("conv1",))[1]["conv1"]
    styles = method.share_styles(site, state.weights).styles
    torch.testing.assert_close(styles["mean"][0], maps.mean((0, 2, 3)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(styles["deviation"][0], maps.mean((2, 3)).std(0).square().add(1e-6).sqrt())


def test_styles_are_constants_for_the_gradient_of_sharing() -> None:
    other = Styles({"mean": torch.zeros(2, 3), "deviation": torch.full((2, 3), 0.5)})
    maps = maps_of(4).requires_grad_()
    shared = Styled(StableFDG(sharing=1), draws(), torch.arange(4), other).share(maps)
    shared.sum().backward()  # type: ignore[no-untyped-call]
    assert maps.grad is not None
    scale = shared.std((2, 3), keepdim=True) / maps.std((2, 3), keepdim=True)
    torch.testing.assert_close(maps.grad, scale.expand_as(maps), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_export_takes_batches_of_any_size() -> None:
    network = StableFDG().adapt_network(MnistCnn(channels=(3, 4), hidden=6).build((1, 16, 16), 3), 1).eval()
    four, seven = (torch.rand(number, 1, 16, 16, generator=draws()) for number in (4, 7))
    exported = torch.export.export(network, (four,), dynamic_shapes=({0: torch.export.Dim("n")},)).module()
    torch.testing.assert_close(exported(seven), network(seven))


def test_sharing_and_exploring_have_probabilities_of_their_own() -> None:
    labels, other = torch.tensor([0, 0, 1, 1]), Styles({name: torch.ones(2, 3) for name in ("mean", "deviation")})
    for sharing, exploring in ((1.0, 0.0), (0.0, 1.0)):
        styled = Styled(StableFDG(sharing=sharing, exploring=exploring), draws(), labels, other)
        assert (styled.share(maps_of(4)) is not None, len(styled.explore(maps_of(4)))) == (True, 8 if exploring else 4)
        assert torch.equal(styled.share(maps_of(4)), maps_of(4)) == (sharing == 0)
