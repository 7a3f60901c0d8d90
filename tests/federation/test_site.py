"""What a call sees of its site: batches, budgets, generators, models, an optimiser that remembers."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CNN, MLP, NORMED, domains, federation, images, plans, setting, vectors
from torch import nn

from fedshift.errors import FedshiftError, TrainingDiverged
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.randomness import derive_seed, generator
from fedshift.federation.site import Batch, Envelope, Role, Site
from fedshift.federation.site_memory import SiteMemory
from fedshift.federation.site_runner import SiteRunner
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models.network import Network
from fedshift.weights import Weights


def site_of(
    number: int = 21,
    network: dict[str, object] = MLP,
    role: Role = "source",
    exchange: int = 1,
    left: int = 1000,
    name: str = "here",
    **options: Any,
) -> Site:
    domain = (images if network["name"] == "mnist_cnn" else vectors)(name, number)
    method = FedAvg()
    (plan,) = plans(method, [domain], {name: role})
    site = SiteRunner(plan, setting(method, [domain], network, **options)).site
    site.begin(Envelope(exchange, 1, 0.0, left))
    return site


def rows(batches: Any) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


# Batches --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.integers(0, 12))
@settings(deadline=None, max_examples=40)
def test_batches_of_epochs_within_the_budget(number: int, batch_size: int, epochs: int, left: int) -> None:
    site = site_of(number, batch_size=batch_size, left=left)
    found = rows(site.batches(epochs))
    whole = rows(site_of(number, batch_size=batch_size).batches(epochs))
    assert found == whole[:left]
    assert site.mini_batches == len(found)
    assert site.samples == number
    every = [row for batch in whole for row in batch]
    repeats = 2 if number == 1 else 1
    assert sorted(every) == sorted(list(range(number)) * epochs * repeats)
    assert all(len(batch) > 1 for batch in whole) or batch_size == 1


def test_steps_go_over_the_data_as_often_as_needed() -> None:
    site = site_of(21)
    found = rows(site.batches(steps=7))
    assert [len(batch) for batch in found] == [8, 8, 5, 8, 8, 5, 8]
    assert found == rows(site_of(21).batches(epochs=3))[:7]
    assert found[0] != found[3]
    site = site_of(21, left=5)
    assert len(rows(site.batches(steps=7))) == 5
    assert rows(site.batches(steps=1)) == []  # the budget is the exchange's, not each loop's
    assert rows(site_of(5).batches(steps=1)) == rows(site_of(5).batches(epochs=1))


def test_a_second_pass_in_one_exchange_draws_another_order() -> None:
    site = site_of(40)
    first, second = rows(site.batches()), rows(site.batches())
    assert first != second
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(40))


def test_an_exchange_begins_anew() -> None:
    """Its first pass has the order of a first pass and its own budget, whatever was drawn in the one before."""
    site = site_of(40, left=9)
    for _ in range(2):
        list(site.batches())
    assert site.mini_batches == 9  # 5 and what was left
    site.begin(Envelope(2, 1, 0.5, 9))
    assert site.mini_batches == 0
    assert rows(site.batches()) == rows(site_of(40, exchange=2).batches())


@pytest.mark.parametrize("weights", ["balanced", (1.0, 4.0, 2.0)])
def test_classes_are_drawn_by_their_weights(weights: Any) -> None:
    site = site_of(21, class_weights=weights, batch_size=7)
    labels = site.data.labels = torch.tensor([0] * 14 + [1] * 5 + [2] * 2)
    counts = torch.bincount(labels).double()
    drawn = [row for batch in rows(site.batches(epochs=300)) for row in batch]
    assert len(drawn) == 300 * 21
    shares = torch.bincount(labels[drawn], minlength=3).double() / len(drawn)
    wanted = torch.full((3,), 1 / 3).double() if weights == "balanced" else counts * torch.tensor(weights).double()
    assert torch.allclose(shares, wanted / wanted.sum(), atol=0.02)
    assert set(drawn) == set(range(21)), "every sample has its part"
    again = site_of(21, class_weights=weights, batch_size=7)
    again.data.labels = labels
    assert rows(again.batches())[0] == drawn[:7]


def test_a_target_without_labels_is_drawn_evenly() -> None:
    site = site_of(21, class_weights="balanced", role="target")
    assert rows(site.batches()) == rows(site_of(21, role="target").batches())


def test_all_batches_are_in_order_and_free() -> None:
    site = site_of(21, left=0)
    assert rows(site.all_batches()) == [list(range(21))]
    assert site.mini_batches == 0


def test_rows_of_many_samples_are_their_numbers() -> None:
    """More than go through a network at a time."""
    site = site_of(600)
    assert [row for batch in site.all_batches() for row in batch.rows.tolist()] == list(range(600))


def test_a_target_hands_out_no_labels() -> None:
    site = site_of(9, role="target")
    for batch in (*site.batches(), *site.all_batches()):
        assert batch.labels is None
        with pytest.raises(FedshiftError, match="unlabelled target for labels"):
            _ = batch.targets
    batch = next(iter(site_of(9).batches()))
    assert batch.targets is batch.labels


def test_generators_depend_on_seed_site_and_exchange_only() -> None:
    def draws(site: Site, used: int = 0) -> list[Any]:
        torch.rand(used)
        torch.rand(used, generator=site.generator)
        drawn = [
            torch.rand(3, generator=site.generator_for(purpose)).tolist()
            for purpose in ("batches", "augmentation", "mine")
        ]
        return [*drawn, rows(site.batches())]

    first = draws(site_of())
    assert draws(site_of(), used=100) == first
    for other in (site_of(seed=4), site_of(exchange=2), site_of(name="there")):
        assert all(mine != theirs for mine, theirs in zip(first, draws(other), strict=True))
    assert len({tuple(draw) for draw in first[:3]}) == 3
    site = site_of()
    dropout = F.dropout(torch.ones(50)).tolist()
    torch.rand(9)
    site.begin(Envelope(2, 1, 0.0, 9))
    assert F.dropout(torch.ones(50)).tolist() != dropout
    site.begin(Envelope(1, 1, 0.0, 9))
    assert F.dropout(torch.ones(50)).tolist() == dropout  # layers of PyTorch that draw by themselves


def test_seeds_are_told_apart_by_their_parts() -> None:
    assert derive_seed(1, "a", "bc") != derive_seed(1, "ab", "c")
    assert derive_seed(0, "site", 1, "batches") == derive_seed(0, "site", 1, "batches")
    assert 0 <= derive_seed("x") < 2**63
    assert torch.equal(torch.rand(2, generator=generator(1, "a")), torch.rand(2, generator=generator(1, "a")))


def test_augmentation_draws_from_its_own_generator() -> None:
    def inputs(**options: Any) -> torch.Tensor:
        return next(iter(site_of(9, CNN, augmentation="ccst", **options).batches())).inputs

    assert torch.equal(inputs(), inputs())
    assert not torch.equal(inputs(), inputs(exchange=2))


# Models and optimisers ------------------------------------------------------------------------------------------------


def cross_entropy(model: nn.Module) -> Any:
    return lambda batch: F.cross_entropy(model(batch.inputs), batch.targets)


def test_models_are_copies() -> None:
    site = site_of(network=NORMED)
    start = site.weights_of(site.network)
    model = site.model()
    assert model.training
    site.minimise(cross_entropy(model), model)
    assert site.weights_of(site.network) == start
    trained = site.weights_of(model)
    assert trained != start
    model.load_state_dict(dict(start))
    assert trained != start  # weights_of copies
    assert site.weights_of(site.model(trained)) == trained


def test_minimise_is_gradient_descent_on_the_mean_loss() -> None:
    site = site_of(21, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
    model = site.model()
    twin = copy.deepcopy(model)
    mean = site.minimise(cross_entropy(model), model, epochs=2)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for batch in site_of(21).batches(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(batch.inputs), batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert mean == pytest.approx(np.mean(losses))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_training_that_turns_to_nan_names_site_round_and_rate() -> None:
    site = site_of(lr=1e30)
    model = site.model()
    with pytest.raises(TrainingDiverged, match=r"site 'here' in round 1 with learning rate 1e\+30"):
        site.minimise(cross_entropy(model), model, epochs=3)


def test_no_budget_no_loss() -> None:
    site = site_of(left=0)
    model = site.model()
    assert site.minimise(cross_entropy(model), model) == 0.0


def test_learning_rate_follows_the_progress_of_the_run() -> None:
    site = site_of(lr_schedule="cosine", lr=0.2)
    site.begin(Envelope(1, 1, 0.5, 10))
    assert site.learning_rate == pytest.approx(0.1)
    assert site.optimizer(site.model()).param_groups[0]["lr"] == pytest.approx(0.1)


def exchanges(site: Site, number: int, through: Path | None = None) -> tuple[Weights, Site]:
    """Exchanges of one epoch each, of which the optimiser's memory goes on; saved and loaded between if wanted."""
    weights: Weights | None = None
    for exchange in range(1, number + 1):
        site.begin(Envelope(exchange, exchange, 0.0, 1000))
        model = site.model(weights)
        site.minimise(cross_entropy(model), model, remember="optimizer")
        weights = site.weights_of(model)
        if through is not None:
            files = site.memory.save(through, exchange)
            site.memory = SiteMemory(["optimizer"])
            site.memory.load(through, files)
    assert weights is not None
    return weights, site


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "mnist_cnn"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimiser_goes_on_over_rounds_and_files(name: str, network: dict[str, object], tmp_path: Path) -> None:
    """Two exchanges of one epoch are one optimiser over both epochs, and a file between them changes no bit."""
    options: dict[str, Any] = {"optimizer": name, "momentum": 0.9, "lr": 0.01, "reset_optimizer_each_round": False}
    found, _ = exchanges(site_of(21, network, **options), 3)
    plain = site_of(21, network, **options)
    model = plain.model()
    optimizer = plain.training.build_optimizer(model.parameters(), 0.01)
    for exchange in (1, 2, 3):
        plain.begin(Envelope(exchange, exchange, 0.0, 1000))
        plain.minimise(cross_entropy(model), model, optimizers=[optimizer])
    assert found == plain.weights_of(model)
    assert exchanges(site_of(21, network, **options), 3, through=tmp_path)[0] == found
    forgetful, site = exchanges(site_of(21, network, **{**options, "reset_optimizer_each_round": True}), 3)
    assert forgetful != found
    assert not site.memory


def test_a_remembered_optimiser_takes_the_present_learning_rate() -> None:
    site = exchanges(site_of(momentum=0.9, lr_schedule="cosine", lr=0.2, reset_optimizer_each_round=False), 1)[1]
    site.begin(Envelope(2, 2, 0.5, 10))
    assert site.optimizer(site.model(), memory="optimizer").param_groups[0]["lr"] == pytest.approx(0.1)
    site.memory["optimizer"] = 3
    with pytest.raises(FedshiftError, match="must be Statistics"):
        site.optimizer(site.model(), memory="optimizer")


def test_an_optimiser_that_is_given_is_remembered_by_whoever_made_it() -> None:
    site = site_of()
    model = site.model()
    with pytest.raises(FedshiftError, match="not those that are given"):
        site.minimise(cross_entropy(model), model, optimizers=[site.optimizer(model)], remember="optimizer")


# What stays ----------------------------------------------------------------------------------------------------------


def test_sites_of_a_process_share_a_network_and_keep_no_model_that_they_trained() -> None:
    """So a thousand sites take as much memory as one, beside their data and what the method has them remember."""
    trained: list[weakref.ref[Network]] = []

    class Watched(FedAvg):
        def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], torch.Tensor]:
            trained.append(weakref.ref(model))
            return super().loss_at(site, model, weights)

    found = domains(MLP, {"a": 9, "b": 9})
    method = Watched(local=["mixup"])
    where = federation(method, found, MLP, momentum=0.9)
    start = Weights(setting(method, found, MLP).build_network().state_dict())
    where.ask(method.fit, to=where.sources, weights=start).drain()
    gc.collect()
    assert [reference() for reference in trained] == [None, None]
    networks = {id(runner.site.network) for runner in cast(LocalFederation, where)._runners.values()}
    assert len(networks) == 1
