"""A site's step of the methods that train on styles of other sites, and what leaves it."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network
from torch import Tensor, nn
from torch.nn import functional

from fedshift.federation.messages import Styles
from fedshift.methods.composition.styles import Channels
from fedshift.methods.federated import fedccrl, pardon, stablefdg
from fedshift.methods.federated.fedccrl import FedCCRL
from fedshift.methods.federated.pardon import Pardon, common_style, first_neighbour_partitions
from fedshift.methods.federated.stablefdg import Highlighted, StableFDG, Styled
from fedshift.models.network import Network
from fedshift.weights import Weights

pytestmark = pytest.mark.usefixtures("double")


def site_of(images: Tensor) -> Any:
    """A site of these images, which are pixels as they stand."""
    return SimpleNamespace(
        name="here",
        device=torch.device("cpu"),
        scratch={},
        samples=len(images),
        pixels=lambda inputs: inputs,
        inputs_of=lambda pixels: pixels,
        generator_for=lambda purpose: torch.Generator().manual_seed(0),
        data=SimpleNamespace(batch=lambda rows: (images[rows], None), stored_rows=lambda rows: images[rows]),
    )


def flat(reference: Reference) -> Network:
    features = nn.Sequential(nn.Flatten(), linear(reference.tensors["A"]))
    return network(features, linear(reference.tensors["G"]), 5, 3)


@compares("federated", "fedccrl_1")
def test_a_step_of_fedccrl(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    images, labels = given["x"], reference.inputs["labels"]

    def loss(contrast: float, agreement: float) -> tuple[Tensor, Network]:
        method = FedCCRL(
            augmix=False, contrast_weight=contrast, agreement_weight=agreement, temperature=options["temperature"]
        )
        drawn = iter(zip(given["means"], given["deviations"], torch.tensor(options["shares"]), strict=True))
        monkeypatch.setattr(FedCCRL, "_draw_styles", lambda *_: next(drawn))
        model = flat(reference)
        others = [Styles({"mean": given["means"][0], "deviation": given["deviations"][0]})]
        return method.beside(site_of(images), model, others)(batch(images, labels)), model

    plain = loss(0.0, 0.0)[0]
    reference.agree("loss without alignment", plain)
    reference.agree("alignment of features, weighted", loss(options["lambda1"], 0.0)[0] - plain)
    reference.agree("alignment of predictions, weighted", loss(0.0, options["lambda2"])[0] - plain)
    whole, model = loss(options["lambda1"], options["lambda2"])
    reference.agree("loss", whole)
    whole.backward()  # type: ignore[no-untyped-call]
    for letter, parameter in zip(("A", "G"), model.parameters(), strict=True):
        assert parameter.grad is not None
        reference.agree(f"{letter} after the step", parameter - options["rate"] * parameter.grad)
    monkeypatch.setattr(torch, "randperm", lambda number, generator: torch.arange(number))
    styles = FedCCRL(shared=options["r"]).share_styles(site_of(images)).styles
    reference.agree("means sent", styles["mean"])
    reference.agree("deviations sent", styles["deviation"])


def test_bytes_are_clipped_and_drawn_by_the_generator() -> None:
    images = torch.tensor([[[[-3.0, 0.2], [0.7, 5.0]]]])

    def mixed(seed: int) -> Tensor:
        return fedccrl.augmix(images.expand(4, 1, 2, 2), torch.Generator().manual_seed(seed))

    assert torch.equal(mixed(1), mixed(1))
    assert any(not torch.equal(mixed(1), mixed(seed)) for seed in (2, 3, 4))
    clipped = images.clamp(0, 1).expand(4, 1, 2, 2)
    assert torch.equal(mixed(1), fedccrl.augmix(clipped, torch.Generator().manual_seed(1)))


class _Squared(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + inputs.square() / 10


def convolution(weight: Tensor) -> nn.Conv2d:
    """A layer x → W x at every position."""
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=False)
    layer.weight = nn.Parameter(weight[:, :, None, None].clone())
    return layer


def of_four_stages(reference: Reference) -> Network:
    """Four stages and the mean over positions, as the method makes a network of them."""
    given = reference.tensors
    layers = OrderedDict(block1=nn.Sequential(convolution(given["first"])))
    for number, name in enumerate(("second", "third", "fourth"), 2):
        layers[f"block{number}"] = nn.Sequential(convolution(given[name]), _Squared())
    stages = {name: f"features.{name}" for name in layers}
    features = nn.Sequential(layers)
    features.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
    plain = Network(features, nn.Linear(4, 3), embedding_size=4, classes=3, stages=stages, alignment_stages=())
    network = StableFDG(attention_size=2).adapt_network(plain, 1)
    block = cast(Highlighted, network.features)
    block.project.weight = nn.Parameter(given["projection"][:, :, None, None].clone())
    block.project.bias = nn.Parameter(given["shift"].clone())
    network.classifier = linear(given["classifier"])
    return network


@compares("federated", "stablefdg_1")
def test_a_step_of_stablefdg(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    happens, orders, shares = iter([True, *options["explored"]]), iter(options["orders"]), iter(options["shares"])
    monkeypatch.setattr(Styled, "_happens", lambda *_: next(happens))
    monkeypatch.setattr(stablefdg, "spread_rows", lambda *_: torch.tensor(options["seeds"]))
    monkeypatch.setattr(stablefdg, "levelling_rows", lambda *_: torch.tensor(options["added"]))
    monkeypatch.setattr(stablefdg, "shuffle_rows", lambda *_: torch.tensor(next(orders)))
    monkeypatch.setattr(stablefdg, "beta", lambda *_: torch.tensor(next(shares)))
    monkeypatch.setattr(torch, "randn", lambda *_, generator: given["normal"])
    seen: dict[str, Tensor] = {}
    for name in ("share", "explore"):
        change = getattr(Styled, name)
        monkeypatch.setattr(
            Styled,
            name,
            lambda self, maps, name=name, change=change: (
                seen.setdefault(name, change(self, maps)) if name not in seen else change(self, maps)
            ),
        )
    network, method = of_four_stages(reference), StableFDG(exploration=options["level"], attention_size=2)
    with torch.no_grad():
        reference.agree("scores", network.eval()(given["x"][:6]))
    styles = sent(method, network, given["x"])
    reference.agree("means sent", styles["mean"])
    reference.agree("deviations sent", styles["deviation"])

    losses: list[Tensor] = []
    site = site_of(given["x"])
    site.objective = SimpleNamespace(
        loss=lambda scores, labels: (losses.append(labels), functional.cross_entropy(scores, labels))[1]
    )
    other = Styles({"mean": given["mean"], "deviation": given["deviation"]})
    loss = method.styled_loss(site, network.train(), other)(batch(given["x"], reference.inputs["labels"]))
    reference.agree("loss", loss)
    reference.agree("labels", torch.bincount(losses[0]))
    reference.agree("a shared map", seen["share"][3, 5])
    reference.agree("the last shared map", seen["share"][31, 9])
    reference.agree("an added map", seen["explore"][40, 2])
    loss.backward()  # type: ignore[no-untyped-call]
    backbone = cast(Highlighted, network.features).backbone
    trained = {
        "first": backbone.get_submodule("block1.0").weight,
        "fourth": backbone.get_submodule("block4.0").weight,
        "projection": cast(Highlighted, network.features).project.weight,
        "shift": cast(Highlighted, network.features).project.bias,
        "classifier": network.classifier.weight,
    }
    for name, parameter in trained.items():
        after = cast(nn.Parameter, parameter)
        assert after.grad is not None
        moved = after - options["rate"] * after.grad
        reference.agree(f"{name} after the step", moved if name == "shift" else moved.flatten(1))


def sent(method: StableFDG, network: Network, images: Tensor) -> Styles:
    """What a site of these images sends of its styles."""
    site = site_of(images)
    site.model = lambda weights: network
    site.all_batches = lambda: [batch(images[:20], None), batch(images[20:], None)]
    return method.share_styles(site, Weights(network.state_dict())).styles


class _Coded(Channels):
    """Styles in the outputs of a convolution, and another one that decodes."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__(unbiased=True)
        self.coder = encoder, decoder

    def encode(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.coder[0](images))

    def decode(self, maps: Tensor, like: Tensor) -> Tensor:
        return cast(Tensor, self.coder[1](maps))


@compares("federated", "pardon_1")
def test_a_step_of_pardon(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    decoder = convolution(given["W"])
    decoder.bias = nn.Parameter(given["B"].clone())
    space = _Coded(convolution(given["V"]), decoder)
    monkeypatch.setattr(Pardon, "_space", lambda *_: space)
    monkeypatch.setattr(pardon, "rows_of_other_classes", lambda *_: torch.tensor(reference.inputs["negatives"]))
    style = Styles({name: given[name][None] for name in ("mean", "deviation")})
    images: list[Tensor] = []
    site = site_of(given["x"])
    site.inputs_of = lambda pixels: (images.append(pixels), pixels)[1]

    def loss(contrast: float) -> tuple[Tensor, Network]:
        method = Pardon(
            style_space="pixel",
            strength=options["alpha"],
            contrast_weight=contrast,
            norm_weight=options["norm"],
            margin=options["margin"],
        )
        model = flat(reference)
        return method.styled_loss(site, model, style)(batch(given["x"], reference.inputs["labels"])), model

    plain = loss(0.0)[0]
    reference.agree("loss without triplets", plain)
    whole, model = loss(options["contrast"])
    reference.agree("triplets, weighted", whole - plain)
    reference.agree("loss", whole)
    reference.agree("an image in the common style", images[0][4])
    whole.backward()  # type: ignore[no-untyped-call]
    for letter, parameter in zip(("A", "G"), model.parameters(), strict=True):
        assert parameter.grad is not None
        reference.agree(f"{letter} after the step", parameter - options["rate"] * parameter.grad)

    sent = Pardon(style_space="pixel").share_style(site_of(given["site"])).styles
    reference.agree("mean that is sent", sent["mean"][0])
    reference.agree("deviation that is sent", sent["deviation"][0])
    reference.agree("groups of its images", first_neighbour_partitions(space.encode(given["site"]).flatten(1))[-1])


@compares("federated", "pardon_2")
def test_the_common_style_of_pardon(reference: Reference) -> None:
    pairs = zip(reference.tensors["means"], reference.tensors["deviations"], strict=True)
    common = common_style([Styles({"mean": mean[None], "deviation": deviation[None]}) for mean, deviation in pairs])
    reference.agree("mean of the common style", common["mean"][0, :12])
    reference.agree("its last means", common["mean"][0, -4:])
    reference.agree("deviation of the common style", common["deviation"][0, :12])
    rows = torch.cat([reference.tensors["means"], reference.tensors["deviations"]], 1)
    reference.agree("first groups of sites", first_neighbour_partitions(rows)[0])


@compares("federated", "pardon_3")
def test_first_neighbours_of_pardon(reference: Reference) -> None:
    fine, coarse = first_neighbour_partitions(reference.tensors["rows"])
    reference.agree("partition 0", fine)
    reference.agree("partition 1", coarse)
