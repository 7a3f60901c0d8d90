"""Steps of pooled methods that change the network or train beside it, on linear networks: the weights that authors'
code comes to."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network, pool
from test_pooled_domains import of_domains, steps, weights_agree
from torch import Tensor, nn

from fedshift.federation.site_base import join_batches
from fedshift.methods.pooled.arm import ARM, InContext, Widened
from fedshift.methods.pooled.erm_plus_plus import ERMPlusPlus
from fedshift.methods.pooled.miro import MIRO, Oracle
from fedshift.methods.pooled.mtl import MTL, Contextual
from fedshift.methods.pooled.sagnet import SagNet
from fedshift.models.network import Network

pytestmark = pytest.mark.usefixtures("double")


@compares("pooled", "sagnet_1")
def test_a_step_by_turns(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    method, losses = SagNet(adversarial_weight=options["lambda"]), []
    monkeypatch.setattr(SagNet, "build_parts", lambda *_: linear(given["S"]))
    for turns in (1, 2, 3):
        orders = iter(options["partners"])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randperm", lambda number, generator: torch.tensor(next(orders)))  # noqa: B023
            patch.setattr(torch, "rand", lambda number, generator: torch.tensor(options["alpha"]))
            model, batches = of_domains(reference)
            site, weights = pool(method, model, batches, options["rate"])
            site.domains = len(batches)
            patch.setattr(SagNet, "of_sources", lambda *_: iter([tuple(batches)] * turns))  # noqa: B023
            update = method.fit(site, weights, steps=1)
        losses.append(turns * update.loss)
    for name, loss in zip(
        ("content loss", "style loss", "adversarial loss, weighted"),
        (losses[0], losses[1] - losses[0], losses[2] - losses[1]),
        strict=True,
    ):
        reference.agree(name, loss)
    weights_agree(reference, update, "after the step")
    reference.agree("S after the step", site.memory.weights("parts")["others.weight"])


@compares("pooled", "mtl_1")
def test_two_steps_with_means(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, method = reference.tensors, MTL(newest=reference.parameters["ema"])

    def whole(*_: object) -> tuple[Network, list[Any]]:
        model, batches = of_domains(reference)
        return model.with_parts(model.features, Contextual(model.classifier, linear(given["M"]), 4, True)), batches

    monkeypatch.setattr("test_pooled_domains.of_domains", whole)
    one, _ = steps(reference, method, 1)
    two, _ = steps(reference, method, 2)
    reference.agree("loss of the first step", one.loss)
    reference.agree("loss of the second step", 2 * two.loss - one.loss)
    names = {"A": "features.weight", "G": "classifier.classifier.weight", "M": "classifier.of_mean.weight"}
    for when, update in (("first", one), ("second", two)):
        for letter, name in names.items():
            reference.agree(f"{letter} after the {when} step", update.weights[name])
        reference.agree(f"means after the {when} step", update.weights["classifier.embeddings"])
    model, _ = whole()
    model.load_state_dict(dict(two.weights))
    reference.agree("logits of the batch of the first domain", model(given["x"][0]))


@compares("pooled", "arm_1")
def test_two_steps_in_context(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given = reference.tensors

    def whole(*_: object) -> tuple[Network, list[Any]]:
        features = InContext(nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.Flatten()))
        first = cast(Widened, cast(nn.Sequential, features.body)[0])
        with torch.no_grad():
            first.images.weight.copy_(given["A"][:, :1])
            first.context.weight.copy_(given["A"][:, 1:])
            for number, name in ((0, "C1"), (3, "C2"), (6, "C3")):
                cast(nn.Conv2d, features.context[number]).weight.copy_(given[name])
                cast(Tensor, features.context[number].bias).zero_()
        batches = [
            batch(x.unsqueeze(1), labels, k)
            for k, (x, labels) in enumerate(zip(given["x"], reference.inputs["labels"], strict=True))
        ]
        return network(features, linear(given["G"]), 27, 3), batches

    monkeypatch.setattr("test_pooled_domains.of_domains", whole)
    monkeypatch.setattr(ARM, "adapt_network", lambda _, network, sources: network)
    monkeypatch.setattr(ARM, "check", lambda *_: None)
    one, _ = steps(reference, ARM(), 1)
    two, _ = steps(reference, ARM(), 2)
    reference.agree("loss of the first step", one.loss)
    reference.agree("loss of the second step", 2 * two.loss - one.loss)
    first = [two.weights[f"features.body.0.{part}.weight"] for part in ("images", "context")]
    reference.agree("A after two steps", torch.cat(first, 1))
    for letter, name in {"G": "classifier.weight", "C3": "features.context.6.weight"}.items():
        reference.agree(f"{letter} after two steps", two.weights[name])
    model, batches = whole()
    model.load_state_dict(dict(two.weights))
    reference.agree("logits of the batch of the first domain", model.eval()(batches[0].inputs))


def test_a_widened_layer_is_drawn_as_one_of_all_channels() -> None:
    wide = Widened(nn.Conv2d(1, 400, 3)).context.weight
    assert wide.abs().max().item() == pytest.approx((2 * 9) ** -0.5, rel=0.02)


@compares("pooled", "erm_plus_plus_1")
def test_the_classifier_first_and_a_mean_of_steps(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    options = reference.parameters
    drawn = []

    def ran(number: int) -> Any:
        drawn.clear()
        model, batches = of_domains(reference)
        site, weights = pool(method, model, [join_batches(*batches)], options["rate"])

        def each(*_: object) -> Any:
            for _ in range(number):
                drawn.append(1)
                yield join_batches(*batches)

        monkeypatch.setattr(ERMPlusPlus, "of_all", each)
        return method.fit(site, weights, steps=number), site

    monkeypatch.setattr(ERMPlusPlus, "progress", lambda *_: len(drawn) / 10)
    method = ERMPlusPlus(linear_share=options["steps of the classifier"] / 10, average_from=0.4)
    first, _ = ran(1)
    update, site = ran(options["steps"])
    reference.agree("loss of the first step", first.loss)
    reference.agree("mean loss of all steps", update.loss)
    weights_agree(reference, update, "of the average")
    for letter, name in (("A", "features.weight"), ("G", "classifier.weight")):
        reference.agree(f"{letter} that trains", site.memory.weights("parts")[f"network.{name}"])


class Staged(nn.Module):
    """A x, seen on its way as 3 channels of 2 positions and as 2 of 3."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear, self.three, self.two = linear(weight), nn.Unflatten(1, (3, 2, 1)), nn.Unflatten(1, (2, 3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.linear(inputs)
        return cast(Tensor, self.two(self.three(features).flatten(1))).flatten(1)


@compares("pooled", "miro_1")
def test_near_the_start_in_trained_deviations(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters

    def staged(features: Tensor) -> Network:
        model = network(Staged(features), linear(given["G"]), 6, 3)
        model.stages = {"three": "features.three", "two": "features.two"}
        return model

    model, start = staged(given["A"]), staged(given["A0"])
    method = MIRO(penalty_weight=options["lambda"], rate_factor=options["rate of variances"] / options["rate"])
    whole = join_batches(*(batch(x, some) for x, some in zip(given["x"], reference.inputs["labels"], strict=True)))
    found = []
    for number in (1, 2):
        site, weights = pool(method, model, [whole] * number, options["rate"])
        oracle = Oracle(start, ("three", "two"), given["x"][0][:1], method.first_variance)
        site.memory["parts"] = site.weights_of(oracle)
        site.all_batches = lambda: iter([whole])  # type: ignore[method-assign]
        found.append((method.fit(site, weights, steps=number), site.memory.weights("parts")))
    (one, _), (two, _) = found
    reference.agree("loss of the first step", one.loss)
    reference.agree("loss of the second step", 2 * two.loss - one.loss)
    _, stages = model.with_stages(whole.inputs, ("three", "two"))
    reference.agree("penalty of the first step", oracle.distance(whole.inputs, stages))
    for when, (update, parts) in zip(("first", "second"), found, strict=True):
        reference.agree(f"A after the {when} step", update.weights["features.linear.weight"])
        reference.agree(f"G after the {when} step", update.weights["classifier.weight"])
        for place, stage in enumerate(("first", "second")):
            reference.agree(f"b of the {stage} stage after the {when} step", parts[f"deviations.{place}"].flatten())


def test_adam_begins_anew_when_the_features_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """DomainBed makes another optimiser then; and Adam's first step is as long as its rate in every number."""
    x, labels = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), [0, 1, 2] * 4
    model = network(linear(torch.eye(3)), linear(torch.tensor([[0.3, -0.2, 0.1]] * 3)), 3, 3)
    done: list[int] = []

    def after(number: int) -> Any:
        done.clear()
        site, weights = pool(method, model, [batch(x, labels)], 0.05, optimizer="adam")

        def each(*_: object) -> Any:
            for _ in range(number):
                done.append(1)
                yield batch(x, labels)

        monkeypatch.setattr(ERMPlusPlus, "of_all", each)
        method.fit(site, weights, steps=number)
        return site.memory.weights("parts")["network.classifier.weight"]

    monkeypatch.setattr(ERMPlusPlus, "progress", lambda *_: len(done) / 10)
    method = ERMPlusPlus(linear_share=0.3, average_from=1.0)
    before, at_join = after(3), after(4)
    torch.testing.assert_close((at_join - before).abs(), torch.full((3, 3), 0.05), atol=1e-5, rtol=0)
