"""DAEL: a step by hand, who teaches whom, an unsure ensemble, the strong view, and the version without target."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from pooling import assert_same, descend, first_batches, fit, pool_of, start, trainable
from tiny import CNN, MLP, domains, plans, run
from torch import Tensor

from fedshift.data.transforms import STRONG, strong_view
from fedshift.experiment.config.experiment import parse
from fedshift.federation.site import Site
from fedshift.methods.heads import Experts
from fedshift.methods.pooled.dael import DAEL
from fedshift.models.network import Network


def experts_of(model: Network) -> Any:
    return cast(Experts, model.classifier).heads


def by_hand(model: Network, site: Site, threshold: float, images: bool) -> tuple[Tensor, Tensor, Tensor]:
    """L_x, L_cr and L_u of the first batches, with three sources."""
    sources, target = first_batches(site)
    draws, heads = site.generator_for("strong view"), experts_of(model)

    def strong(inputs: Tensor) -> Tensor:
        return strong_view(inputs, STRONG, site.data.preprocessing, draws) if images else inputs

    views = [strong(batch.inputs) for batch in sources]
    own = consensus = torch.zeros(())
    for number, (batch, view) in enumerate(zip(sources, views, strict=True)):
        said = heads[number](model.features(batch.inputs)).softmax(1)
        own = own - (said[torch.arange(len(said)), batch.targets] + 1e-5).log().mean() / 3
        left, right = (heads[other](model.features(view)).softmax(1) for other in range(3) if other != number)
        consensus = consensus + (((left + right) / 2 - said.detach()) ** 2).sum(1).mean() / 3
    weak = torch.stack([head(model.features(target.inputs)).softmax(1) for head in heads]).detach()
    surest = weak.amax(2).argmax(0)
    labels = weak.argmax(2)[surest, torch.arange(len(surest))]
    sure = weak.amax((0, 2)) >= threshold
    view = model.features(strong(target.inputs))
    mean = sum(head(view).softmax(1) for head in heads) / 3
    unlabelled = -((mean[torch.arange(len(labels)), labels] + 1e-5).log() * sure).mean()  # type: ignore[index]
    return own, consensus, unlabelled


@pytest.mark.parametrize("network", [MLP, CNN], ids=["vectors", "images"])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.4}, {"threshold": 0.4, "unlabelled_weight": 2.0}], ids=str)
def test_a_step_by_hand(options: dict[str, Any], network: dict[str, object]) -> None:
    method = DAEL(**options)
    site, weights = pool_of(method, network), start(method, network)
    model = site.model(weights)
    own, consensus, unlabelled = by_hand(model, site, method.threshold, network is CNN)
    loss = own + consensus + options.get("unlabelled_weight", 0.5) * unlabelled
    assert (unlabelled > 0) == (method.threshold < 0.9)
    descend(loss, trainable(model))
    update = fit(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(update.weights, model)
    assert set(site.memory) <= {"optimizer"}


def test_the_version_without_target_serves_domain_generalization() -> None:
    method = DAEL(unlabelled_weight=0)
    assert not method.traits.needs_target
    assert DAEL().traits.needs_target
    assert not plans(method, domains(MLP))[0].unlabelled
    assert method.target_mini_batches(5, 3) == 0
    state, where = run(method, network=MLP, budget=30, rounds=3)
    assert state.round == 3
    assert where.progress.used["pool"] == 30  # steps of three mini-batches
    whole = {"data": "rotated_digits", "model": "mnist_cnn", "protocol": {"kind": "leave_one_out"}}
    parse({**whole, "methods": [{"name": "dael", "unlabelled_weight": 0}]})
    with pytest.raises(Exception, match="dael"):
        parse({**whole, "methods": ["dael"]})


def test_pseudo_labels_are_of_the_weak_view() -> None:
    """The strong view learns them, whatever the experts say of itself."""
    method = DAEL(threshold=0.0)
    site = pool_of(method)
    model = site.model(start(method))
    _, target = first_batches(site)
    strong = target.inputs.flip(0) * -3.0
    heads = experts_of(model)
    with torch.no_grad():
        weak, own = (
            torch.stack([head(model.features(inputs)).softmax(1) for head in heads])
            for inputs in (target.inputs, strong)
        )
        surest = weak.amax(2).argmax(0)
        labels = weak.argmax(2)[surest, torch.arange(len(surest))]
        assert not torch.equal(labels, own.argmax(2)[own.amax(2).argmax(0), torch.arange(len(surest))])
        expected = -(own.mean(0)[torch.arange(len(labels)), labels] + 1e-5).log().mean()
        torch.testing.assert_close(method.target_loss(model, target, strong), expected)
