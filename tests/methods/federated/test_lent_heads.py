"""MCGDM and MCSAD: whose classifiers a site has, and hard styles. Steps: see `test_classifiers_of_others`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lost import lose, site_of
from tiny import CNN, domains, federation, start_of, step_on
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.site import Batch, Envelope
from fedshift.methods.base import Samples, State
from fedshift.methods.federated import mcgdm
from fedshift.methods.federated.lent_heads import LentHeads
from fedshift.methods.federated.mcgdm import MCGDM
from fedshift.methods.federated.mcsad import MCSAD, styled_stages
from fedshift.models.network import Network
from fedshift.models.networks.cnn import MnistCnn
from fedshift.models.networks.mlp import Mlp
from fedshift.models.networks.vision import ResNet18
from fedshift.weights import Weights

SIZES = {"a": 9, "b": 17, "c": 23}
BOTH = pytest.mark.parametrize("method", [MCGDM(), MCSAD()], ids=["mcgdm", "mcsad"])
SITE: Any = SimpleNamespace(generator_for=lambda purpose: torch.Generator().manual_seed(0), device="cpu")


def cnn() -> Network:
    return MnistCnn(channels=(3, 4), hidden=6).build((1, 12, 12), 3)


def batch_of(number: int) -> Batch:
    draws = torch.Generator().manual_seed(1)
    images, rows = torch.randn(number, 1, 12, 12, generator=draws), torch.arange(number)
    return Batch(images, rows % 3, rows * 0, rows)


def lent(method: LentHeads, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Weights]]:
    """What sites are lent from now on."""
    seen: list[dict[str, Weights]] = []
    plain = type(method).fit_beside

    def fit_beside(self: LentHeads, site: Any, weights: Weights, heads: Mapping[str, Weights]) -> Any:
        seen.append(dict(heads))
        return plain(self, site, weights, heads)

    fit_beside.__annotations__ = plain.__annotations__
    monkeypatch.setattr(type(method), "fit_beside", fit_beside)
    return seen


def begun(method: LentHeads) -> tuple[Federation, State]:
    found = domains(CNN, SIZES)
    return federation(method, found, rounds=3), State(start_of(method, found))


@BOTH
def test_a_site_has_the_classifiers_that_all_sites_trained(method: LentHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    where, state = begun(method)
    heads = lent(method, monkeypatch)
    start = state.weights.select("classifier")
    first = step_on(method, where, state)
    assert heads == [{"common": start}] * 3
    step_on(method, where, first)
    assert heads[3:] == [dict(first.parts)] * 3
    assert set(first.parts) == set(SIZES)
    trained = [first.parts[site] for site in SIZES]
    assert all(head != other for head in trained for other in (start, *trained) if head is not other)
    mean = {name: sum(SIZES[s] * first.parts[s][name] for s in SIZES) / 49 for name in start}  # type: ignore[index]
    for name, value in mean.items():
        torch.testing.assert_close(first.weights[name], value)


@BOTH
def test_the_classifier_of_a_lost_site_stays(method: LentHeads) -> None:
    where, state = begun(method)
    first = step_on(method, where, state)
    lose(where, "b")
    second = step_on(method, where, first)
    assert second.parts["b"] == first.parts["b"]
    assert second.parts["a"] != first.parts["a"]


@BOTH
def test_classifiers_of_others_are_not_trained(method: LentHeads) -> None:
    model, heads = cnn(), [{name: value.clone() for name, value in cnn().classifier.state_dict().items()}]
    site = SimpleNamespace(**vars(SITE), data=site_of(federation(method, domains(CNN, SIZES)), "a").data)
    method.loss_beside(site, model, heads)(batch_of(6)).backward()  # type: ignore[arg-type, no-untyped-call]
    assert all(value.grad is None for value in heads[0].values())
    assert all(parameter.grad is not None for parameter in model.parameters())


@BOTH
def test_vectors_are_refused(method: LentHeads) -> None:
    with pytest.raises(UserError, match=f"{method.name} needs images"):
        method.check_samples(Samples((5,)))


def test_views_are_drawn_anew_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    where, state = begun(MCGDM())
    site, drawn = site_of(where, "a"), list[float]()
    monkeypatch.setattr(
        mcgdm,
        "strong_view",
        lambda inputs, *given: (drawn.append(float(torch.rand((), generator=given[-1]))), inputs)[1],
    )
    for number in (1, 1, 2):
        site.begin(Envelope(number, number, 0.0, 1))
        MCGDM().fit_beside(site, state.weights, {"common": state.weights.select("classifier")})
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_style_that_does_not_move_changes_nothing() -> None:
    model, batch = cnn(), batch_of(6)
    method = MCSAD(style_rate=0.0, contrast_weight=0.0, agreement_weight=0.0)
    loss = method.loss_beside(SITE, model, [dict(model.classifier.state_dict())])(batch)
    torch.testing.assert_close(loss, 2 * functional.cross_entropy(model(batch.inputs), batch.targets))


def test_the_stages_are_the_first_two_with_maps() -> None:
    assert styled_stages(cnn()) == ("conv1", "conv2")
    resnet = ResNet18(pretrained=False).build((3, 32, 32), 3)
    assert styled_stages(resnet) == ("block1", "block2")
    with pytest.raises(UserError, match="two stages of maps"):
        MCSAD().check(Mlp().build((5,), 3))
