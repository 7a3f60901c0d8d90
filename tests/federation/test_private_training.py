"""Private training at a site: its steps, its batches and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from federation.tiny import CLASSES, CNN, MLP, NORMED, domains, plans, setting, vectors
from fedshift.data.site_data import poisson_batches
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Update
from fedshift.federation.plain_values import parse_json
from fedshift.federation.private_training import check_network
from fedshift.federation.randomness import Draws
from fedshift.federation.setting_json import SettingRecipe, setting_from, setting_recipe
from fedshift.federation.site import Envelope, Site
from fedshift.federation.site_runner import SiteRunner
from fedshift.federation.training import Privacy
from fedshift.functional.losses import task_loss
from fedshift.methods.base import Method
from fedshift.methods.federated.alone import Alone
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.models import registry as models
from fedshift.weights import Weights

# Importing it takes longer than these tests, and would be done by every worker.
pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
PRIVATE = Privacy(noise_multiplier=1.0, clip_norm=1e6)


def site_of(method: Method, network: dict[str, object], noise: float | None, size: int = 10, **training: Any) -> Site:
    """A site of ten samples; with ``noise`` one that trains privately."""
    found = domains(network, {"large": size})
    whole = setting(method, found, network, privacy=PRIVATE if noise is not None else None, **training)
    if noise is not None:
        whole = replace(whole, draws={"large": Draws(noise, "run large")})
    site = SiteRunner(plans(method, found)[0], whole).site
    site.begin(Envelope(exchange=1, round=1, progress=0.0, mini_batches_left=100))
    return site


def fitted(method: Method, site: Site) -> Update:
    start = site.weights_of(site.model())
    return method.fit(site) if isinstance(method, Alone) else method.fit(site, start)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "network"),
    [
        (FedAvg(local_epochs=5), CNN),
        (FedProx(local_epochs=5, proximal_weight=3.0), MLP),
        (Alone(local_epochs=5), {"name": "linear"}),
    ],
)
def test_without_noise_and_clipping_private_steps_are_plain_ones(method: Method, network: dict[str, object]) -> None:
    """Every sample is in every batch, since the batch size is that of the site."""
    plain = fitted(method, site_of(method, network, None, batch_size=10))
    private = fitted(method, site_of(method, network, 0.0, batch_size=10))
    for name, weights in plain.weights.items():
        assert torch.allclose(weights, private.weights[name], atol=1e-5), name
    assert (plain.loss > 0, private.loss) == (True, 0.0)


def test_private_steps_have_the_rates_of_their_layers() -> None:
    """Noise included: one step with the same noise is half as long where the rate is."""
    method = FedAvg()
    start = site_of(method, MLP, 1.0).model().state_dict()
    plain, found = (
        fitted(method, site_of(method, MLP, 1.0, batch_size=10, layer_rates=rates)).weights
        for rates in ({}, {"features": 0.5})
    )
    for name, before in start.items():
        factor = 0.5 if name.startswith("features") else 1.0
        assert torch.allclose(found[name] - before, factor * (plain[name] - before), rtol=1e-3, atol=1e-6), name


def test_noise_has_the_deviation_that_epsilon_was_computed_for() -> None:
    """Nothing but noise moves the weights, since gradients are clipped to almost nothing."""
    method = FedAvg(steps_per_round=1)
    site = site_of(method, CNN, 1.5, batch_size=4, lr=1.0, momentum=0.0)
    site.training = site.training.model_copy(update={"privacy": Privacy(noise_multiplier=1.5, clip_norm=1e-3)})
    start = site.weights_of(site.model())
    moved = torch.cat([(fit - start[name]).flatten() for name, fit in method.fit(site, start).weights.items()])
    expected = 1.5 * 1e-3 / 4
    assert float(moved.std()) == pytest.approx(expected, rel=0.15)


def test_a_repeated_exchange_repeats_its_noise_and_no_other_does() -> None:
    def weights(exchange: int, stream: str) -> Weights:
        site = site_of(FedAvg(), MLP, 1.0)
        site.draws = Draws(1.0, stream)
        site.begin(Envelope(exchange, 1, 0.0, 100))
        return fitted(FedAvg(), site).weights

    first, again, later, other = weights(1, "a"), weights(1, "a"), weights(2, "a"), weights(1, "b")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], later[name]) or torch.equal(first[name], other[name]) for name in first)


def test_a_worker_is_told_where_noise_comes_from() -> None:
    whole = replace(setting(FedAvg(), domains(MLP), MLP, privacy=PRIVATE), draws={"large": Draws(0.5, "run large")})
    assert setting_from(parse_json(SettingRecipe, json.dumps(setting_recipe(whole).plain()), "it")) == whole


def test_batches_are_random_and_keep_to_the_budget() -> None:
    site = site_of(FedAvg(), MLP, 1.0, size=40, batch_size=4)
    sizes = [len(batch.rows) for batch in site.batches(epochs=20)]
    assert len(sizes) == 100  # the budget; 20 epochs would have 200
    assert np.mean(sizes) == pytest.approx(4, abs=0.8)
    assert min(sizes) < 3 < 5 < max(sizes)


def test_a_step_without_samples_is_noise() -> None:
    site = site_of(FedAvg(), MLP, 1.0, size=40, batch_size=1)
    sizes = [len(rows) for rows in poisson_batches(site.data, 1, 3, site.draws.generator(1, "batches"))]  # type: ignore[union-attr]
    assert 0 in sizes
    fitted(FedAvg(steps_per_round=3), site)
    assert site.mini_batches == 3


def test_a_group_is_in_a_batch_as_a_whole() -> None:
    domain = replace(vectors("large", 30), groups=np.arange(30) % 6 + 100)
    whole = replace(setting(FedAvg(), [domain], MLP, privacy=PRIVATE), draws={"large": Draws(0.0, "run")})
    site = SiteRunner(plans(FedAvg(), [domain])[0], whole).site
    sizes = []
    for rows in poisson_batches(site.data, 10, 50, torch.Generator().manual_seed(0)):
        chosen = {int(row) % 6 for row in rows}
        assert len(rows) == 5 * len(chosen)
        sizes.append(len(rows))
    assert np.mean(sizes) == pytest.approx(10, abs=2)


def test_groups_of_equal_size_train_as_their_samples_do() -> None:
    """Without noise and clipping: the mean over groups of their means is the mean over samples."""
    found = vectors("large", 12)
    method, steps = FedAvg(local_epochs=2), []
    for groups in (None, np.arange(12) // 3):
        whole = setting(method, [replace(found, groups=groups)], MLP, privacy=PRIVATE, batch_size=12)
        site = SiteRunner(
            plans(method, [replace(found, groups=groups)])[0], replace(whole, draws={"large": Draws(0.0, "run large")})
        ).site
        site.begin(Envelope(exchange=1, round=1, progress=0.0, mini_batches_left=100))
        steps.append(fitted(method, site).weights)
    for name, weights in steps[0].items():
        torch.testing.assert_close(weights, steps[1][name], rtol=1e-4, atol=1e-6)


def test_what_mixes_samples_is_refused() -> None:
    check_network(models.build(models.parse(CNN), (1, 12, 12), CLASSES, 0), (1, 12, 12))
    frozen = {"name": "frozen", "backbone": {"name": "resnet18", "pretrained": "imagenet"}, "head": {**MLP}}
    check_network(models.build(models.parse(frozen), (5,), CLASSES, 0), (5,))  # its BatchNorm does not train
    with pytest.raises(UserError, match="BatchNorm"):
        check_network(models.build(models.parse(NORMED), (5,), CLASSES, 0), (5,))


def test_a_loss_with_a_part_of_no_sample_is_refused_unless_it_is_the_regulariser() -> None:
    site = site_of(FedAvg(), MLP, 0.0)
    model = site.model()

    def pull() -> torch.Tensor:
        return torch.stack([value.square().sum() for value in model.parameters()]).sum()

    with pytest.raises(FedshiftError, match="regulariser"):
        site.minimise(lambda batch: task_loss(model(batch.inputs), batch.targets) + pull(), model)
    site.minimise(lambda batch: task_loss(model(batch.inputs), batch.targets), model, regulariser=pull)


def test_only_minimise_is_private() -> None:
    site = site_of(FedAvg(), MLP, 1.0)
    model = site.model()
    with pytest.raises(FedshiftError, match="minimise_over"):
        site.minimise_over(site.batches(), lambda batch: task_loss(model(batch.inputs), batch.targets), model)


@pytest.mark.parametrize(
    "wrong", [{}, {"epsilon": 1, "noise_multiplier": 1}, {"epsilon": 0}, {"epsilon": 1, "delta": 1}]
)
def test_privacy_says_one_of_epsilon_and_noise(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"epsilon|noise_multiplier|delta"):
        Privacy(**wrong)  # type: ignore[arg-type]
