"""Plug-ins of local training: a step of each by another way, and that they go with every federated method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from every_method import method_of, mostly_slow
from pooling import assert_same, descend, trainable
from pydantic import ValidationError
from tiny import CNN, LINEAR, MLP, bytes_of, domains, federation, images, run, setting, start_of
from torch import Tensor

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Update
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.federation.site_runner import SiteRunner
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.composition.local import PLUG_INS
from fedshift.methods.composition.triplets import KeyQueue, momentum_triplet_loss
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models.network import Network
from fedshift.weights import Weights

CLASSES = [registry.method_class(name) for name in registry.names()]
TAKING = [kind.name for kind in CLASSES if not kind.traits.pooled and kind.traits.takes_plug_ins]
ALL = ["mixstyle", "amplitude_mix", {"name": "label_gradient", "share": 0.2}, "jigsaw", "triplets"]
ALL += ["mixup", {"name": "cutmix", "probability": 1}, "sharpness", "dropout", "label_smoothing"]
ALL += [{"name": "augment", "by": {"shear": 0.2, "cut_out": 0.2}}]
HALVES = ALL[::2], ALL[1::2]
FIRST = Envelope(1, 1, 0.0, 100)
ONE = [images("site", 8)]
"""One site, whose only mini-batch has eight samples."""


def site_of(method: Method, network: Mapping[str, object] = CNN, **options: Any) -> tuple[SiteRunner, Weights]:
    """The site, and the common start."""
    where = federation(method, ONE, network, **{"momentum": 0.0, **options})
    assert isinstance(where, LocalFederation)
    return where._runners["site"], start_of(method, ONE, network)


def fitted(runner: SiteRunner, weights: Weights, envelope: Envelope = FIRST) -> Weights:
    reply, _ = runner.run("fit", envelope, {"weights": weights})
    assert isinstance(reply, Update)
    return reply.weights


def beginning(site: Site, weights: Weights) -> tuple[Network, Batch]:
    """The model and the mini-batch of the exchange, for the same step by hand."""
    site.begin(FIRST)
    model, batch = site.model(weights), next(site.batches(steps=1))
    site.begin(FIRST)
    return model, batch


def head_of(site: Site, name: str, make: Callable[[], Any]) -> Any:
    """The head with which every site begins."""
    with drawn_from(derive_seed(site.seed, "plug-in", name)):
        return make()


# A step of each -------------------------------------------------------------------------------------------------------


def test_amplitude_mix_by_numpy() -> None:
    method = FedAvg(local=[{"name": "amplitude_mix", "strength": 0.8, "share": 0.3}])
    runner, weights = site_of(method)
    model, batch = beginning(runner.site, weights)
    draws = runner.site.generator_for("amplitude mix")
    order, rate = torch.randperm(8, generator=draws), 0.8 * torch.rand(8, 1, 1, 1, generator=draws)
    pixels = batch.inputs.numpy() * 0.25 + 0.5
    spectrum = np.fft.fft2(pixels)
    mixed = (1 - rate.numpy()) * np.abs(spectrum) + rate.numpy() * np.abs(spectrum[order.numpy()])
    view = np.clip(np.fft.ifft2(mixed * np.exp(1j * np.angle(spectrum))).real, 0, 1)
    other = torch.from_numpy((view - 0.5) / 0.25).float()
    loss = 0.7 * F.cross_entropy(model(batch.inputs), batch.targets) + 0.3 * F.cross_entropy(
        model(other), batch.targets
    )
    descend(loss, trainable(model))
    assert_same(fitted(runner, weights), model)


def test_label_gradient_by_hand() -> None:
    """On a linear model the gradient by the inputs is Wᵀ(p − y)/n."""
    method = FedAvg(local=[{"name": "label_gradient", "perturbation": 2.0, "clip": 0.01}])
    runner, weights = site_of(method, {**LINEAR})
    model, batch = beginning(runner.site, weights)
    with torch.no_grad():
        error = (model(batch.inputs).softmax(1) - F.one_hot(batch.targets, 3)) / 8
        gradient = (error @ weights["classifier.weight"]).view_as(batch.inputs)
        other = batch.inputs + 2 * gradient.clamp(-0.01, 0.01)
        assert F.cross_entropy(model(other), batch.targets) > F.cross_entropy(model(batch.inputs), batch.targets)
    loss = (F.cross_entropy(model(batch.inputs), batch.targets) + F.cross_entropy(model(other), batch.targets)) / 2
    descend(loss, trainable(model))
    assert_same(fitted(runner, weights), model)


def test_triplets_by_hand() -> None:
    option = {"name": "triplets", "weight": 0.7, "embedding": 4, "queue": 6, "hard_negatives": 2, "momentum": 0.9}
    runner, weights = site_of(FedAvg(local=[option]))
    model, batch = beginning(runner.site, weights)
    queue = head_of(runner.site, "triplets", lambda: KeyQueue(model, 4, 6, 0.9))
    before = {name: value.clone() for name, value in model.features.state_dict().items()}
    with torch.no_grad():
        keys = F.normalize(queue.embed(model.features(batch.inputs)))
    found = F.normalize(queue.embed(model.features(batch.inputs)))
    draws = runner.site.generator_for("triplets")
    apart = momentum_triplet_loss(found, keys, batch.targets, keys[-6:], batch.targets[-6:], 2.0, 2, draws)
    loss = F.cross_entropy(model(batch.inputs), batch.targets) + 0.7 * apart
    descend(loss, [*trainable(model), *queue.embed.parameters()])
    assert_same(fitted(runner, weights), model)
    memory = runner.site.memory.weights("triplets")
    torch.testing.assert_close(memory["keys"], keys[-6:])
    for name, value in model.features.state_dict().items():
        torch.testing.assert_close(memory[f"encoder.network.0.{name}"], 0.9 * before[name] + 0.1 * value)


def test_the_encoder_of_keys_follows_the_site_s_own_steps_alone() -> None:
    """Not the common model that comes with the next exchange: it has followed its own last step already."""
    option = {"name": "triplets", "embedding": 4, "momentum": 0.5}
    runner, weights = site_of(FedAvg(local=[option]))
    first = fitted(runner, weights)
    second = fitted(runner, weights, Envelope(2, 2, 0.1, 100))
    found = runner.site.memory.weights("triplets")
    for name in (name for name in weights if name.startswith("features.")):
        expected = (weights[name] + first[name]) / 4 + second[name] / 2
        kept = found[name.replace("features.", "encoder.network.0.", 1)]
        torch.testing.assert_close(kept, expected, atol=1e-6, rtol=1e-5)


# Composition ----------------------------------------------------------------------------------------------------------


def test_the_first_of_the_list_acts_first() -> None:
    """Both views are puzzled, or only the site's images: other draws, another step."""
    both, once = (
        fitted(*site_of(FedAvg(local=order))) for order in (["amplitude_mix", "jigsaw"], ["jigsaw", "amplitude_mix"])
    )
    assert both != once


def test_clipping_counts_the_head() -> None:
    """The norm of all gradients together is bounded, so a loud head leaves the model less."""
    loud = FedAvg(local=[{"name": "jigsaw", "weight": 1000.0, "ordered": 0.0}])
    runner, weights = site_of(loud, clip_norm=0.1)
    after = fitted(runner, weights)
    head = head_of(runner.site, "jigsaw", lambda: torch.nn.Linear(runner.site.network.embedding_size, 31)).state_dict()
    moved = [(after[name] - weights[name]) / 0.05 for name in weights]
    moved += [(value - head[name]) / 0.05 for name, value in runner.site.memory.weights("jigsaw").items()]
    assert torch.cat([part.flatten() for part in moved]).norm().item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("name", mostly_slow(TAKING))
def test_they_go_with_every_federated_method(name: str) -> None:
    """Another model, the same bytes, which a dry run foretells; and no hook is left behind.

    One half of them after the other: many ask twice for the loss, and a mini-batch with all of them asks 64 times.
    """
    found = domains(CNN, {"large": 9, "small": 5})
    few: dict[str, Any] = {
        "rounds": 1,
        "budget": 4 if registry.method_class(name).traits.target == "labelled" else None,
    }
    plain, where = run(method_of(name), found, **few)
    _, here = where.ledger.settle()
    for local in HALVES:
        state, plugged = run(method_of(name, local=local), found, **few)
        assert all(tensor.isfinite().all() for tensor in state.weights.values() if tensor.is_floating_point())
        assert state.weights != plain.weights
        assert plugged.ledger.settle()[1] == here
        assert isinstance(plugged, LocalFederation)
        for runner in plugged._runners.values():
            assert ("triplets" in runner.site.memory) == (runner.site.role == "source" and "triplets" in local)
            assert not any(module._forward_hooks for module in runner.site.network.modules())
            if runner.site.role == "target":
                assert runner.method.calls.plug_ins(runner.site) == ()


@pytest.mark.slow
def test_a_dry_run_foretells_their_bytes() -> None:
    method = method_of("csac", local=ALL)
    found = domains(CNN, {"large": 9, "small": 5})
    _, where = run(method, found)
    _, sent = where.ledger.settle()
    foretold = bytes_of(method, where, found=found)
    assert (foretold.up, foretold.down) == (sum(sent["up"].values()), sum(sent["down"].values()))


def test_csac_s_frozen_features_are_those_of_the_view() -> None:
    """They can be kept for each sample only if its inputs never change."""
    for local, fixed in (([], True), (["mixstyle", "jigsaw"], True), (["amplitude_mix"], False)):
        runner, _ = site_of(method_of("csac", local=local))
        runner.site.plug_ins = runner.method.calls.plug_ins(runner.site)
        assert runner.site.fixed_inputs is fixed


def test_plug_ins_work_on_prepared_samples() -> None:
    found = [run(method_of("fedavg", prepare="styles", local=local), rounds=1)[0].weights for local in ([], ["jigsaw"])]
    assert found[0] != found[1]


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "metareg", "local": ["mixstyle"]}, "several networks"),
        ({"name": "fada", "local": ["mixstyle"]}, "several networks"),
        ({"name": "fedadg", "local": ["mixstyle"]}, "several networks"),
        ({"name": "fedavg", "local": ["mixstyle", "mixstyle"]}, "twice"),
        ({"name": "fedavg", "local": ["mixstile"]}, "did you mean 'mixstyle'"),
        ({"name": "fedavg", "local": [{"name": "jigsaw", "omega": 1}]}, "jigsaw has no option 'omega'"),
        ({"name": "fedavg", "local": [{"mixup": {"alpha": 1}}]}, "{name: mixup, alpha: 1}"),
        ({"name": "fedavg", "local": [{"alpha": 1}]}, "name: one of .*mixup"),
        ({"name": "fedavg", "local": 3}, "must be a list"),
        ({"name": "styles", "method": {"name": "fada"}, "local": ["mixstyle"]}, "several networks"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        registry.parse(options)


@pytest.mark.parametrize(
    ("option", "network", "words"),
    [
        ("mixstyle", MLP, "mixstyle needs images"),
        ("amplitude_mix", MLP, "amplitude_mix needs images"),
        ("jigsaw", MLP, "jigsaw needs images"),
        ("cutmix", MLP, "cutmix needs images"),
        ({"name": "augment", "by": "digits"}, MLP, "augment needs images"),
        ("stochastic_depth", CNN, "no residual blocks"),
        ({"name": "mixstyle", "stages": ["conv3"]}, CNN, "there is no stage 'conv3'"),
        ({"name": "mixstyle", "stages": ["hidden"]}, CNN, "no stage of the network"),
    ],
)
def test_what_does_not_fit_the_network_or_the_samples(option: Any, network: dict[str, object], words: str) -> None:
    (plug_in,) = FedAvg(local=[option]).local
    whole = setting(FedAvg(), domains(network), network)
    with pytest.raises(UserError, match=words):
        plug_in.check(whole.build_network(), whole.input_shape)


def test_those_that_fit_pass_the_check() -> None:
    whole = setting(FedAvg(), domains(CNN), CNN)
    for name in PLUG_INS:
        (plug_in,) = FedAvg(local=[{"name": name, **({"by": "digits"} if name == "augment" else {})}]).local
        if name != "stochastic_depth":  # it needs residual blocks
            plug_in.check(whole.build_network(), whole.input_shape)
    vectors = setting(FedAvg(), domains(MLP), MLP)
    for name in ("label_gradient", "triplets", "mixup", "sharpness", "dropout", "label_smoothing"):
        (plug_in,) = FedAvg(local=[name]).local
        plug_in.check(vectors.build_network(), vectors.input_shape)


class Alien(FedAvg):
    """Trains in a loop of its own."""

    def fit(self, site: Site, weights: Weights) -> Update:
        model = site.model(weights)
        optimizer = site.optimizer(model)
        for batch in site.batches():
            optimizer.zero_grad()
            loss: Tensor = F.cross_entropy(model(batch.inputs), batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return Update(site.weights_of(model), site.samples, 0.0)


def test_a_method_that_would_train_without_them_fails() -> None:
    with pytest.raises(FedshiftError, match="trains without it"):
        run(Alien(local=["jigsaw"]), rounds=1)
    run(Alien(), rounds=1)


def test_label_smoothing_is_of_the_mini_batch_at_hand() -> None:
    """Also where a loss asks the features and not the classifier, after one that asked both."""
    runner, weights = site_of(FedAvg(local=["label_smoothing"]))
    plug_in = PLUG_INS["label_smoothing"].model_validate({"smoothing": 0.4}).at(runner.site)
    model, batch = beginning(runner.site, weights)
    other = batch.part(slice(0, 2))
    plug_in.begin(model)
    with plug_in.attach(model):
        plug_in.loss(lambda given: F.cross_entropy(model(given.inputs), given.targets), batch)
        found = plug_in.loss(lambda given: model.features(given.inputs).square().mean(), other)
    plain = model.features(other.inputs).square().mean()
    torch.testing.assert_close(found, 0.6 * plain - 0.4 * model(other.inputs).log_softmax(1).mean())


def test_a_head_and_its_momentum_go_on_in_the_next_exchange() -> None:
    method = FedAvg(local=[{"name": "jigsaw", "ordered": 0.0}])
    runner, weights = site_of(method, momentum=0.9, reset_optimizer_each_round=False)
    fitted(runner, weights)
    head = runner.site.memory.weights("jigsaw")
    assert set(runner.site.memory) == {"optimizer", "jigsaw", "jigsaw_optimizer"}
    fitted(runner, weights, Envelope(2, 2, 0.1, 100))
    assert runner.site.memory.weights("jigsaw") != head
