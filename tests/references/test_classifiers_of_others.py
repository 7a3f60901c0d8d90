"""A site's step of the methods whose sites train beside the classifiers of all sites."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network
from torch import Tensor, nn

from fedshift.methods.federated import mcgdm, mcsad
from fedshift.methods.federated.mcgdm import MCGDM
from fedshift.methods.federated.mcsad import MCSAD, HardStyle
from fedshift.models.network import Network

pytestmark = pytest.mark.usefixtures("double")
SITE: Any = SimpleNamespace(
    generator_for=lambda purpose: torch.Generator().manual_seed(0), data=SimpleNamespace(preprocessing=None)
)


def stepped(parameter: Tensor, rate: float) -> Tensor:
    assert parameter.grad is not None
    return parameter.detach() - rate * parameter.grad


@compares("federated", "mcgdm_1")
def test_a_step_of_mcgdm(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    monkeypatch.setattr(mcgdm, "strong_view", lambda *_: given["view"])
    heads = [{"weight": weight, "bias": bias} for weight, bias in zip(given["heads"], given["biases"], strict=True)]

    def loss(inter: float, intra: float) -> tuple[Tensor, Network]:
        classifier = linear(given["G"])
        classifier.bias = nn.Parameter(given["b"].clone())
        model = network(nn.Sequential(linear(given["A"]), nn.Tanh()), classifier, 4, 3)
        method = MCGDM(inter_weight=inter, intra_weight=intra)
        return method.loss_beside(SITE, model, heads)(batch(given["x"], reference.inputs["labels"])), model

    plain = loss(0.0, 0.0)[0]
    reference.agree("task loss", plain)
    reference.agree("within the site, weighted", loss(0.0, options["intra"])[0] - plain)
    reference.agree("between sites, weighted", loss(options["inter"], 0.0)[0] - plain)
    whole, model = loss(options["inter"], options["intra"])
    reference.agree("loss", whole)
    whole.backward()  # type: ignore[no-untyped-call]
    for letter, parameter in zip(("A", "G", "b"), model.parameters(), strict=True):
        reference.agree(f"{letter} after the step", stepped(parameter, options["rate"]))
    assert all(tensor.grad is None for head in heads for tensor in head.values())


def of_two_stages(given: dict[str, Tensor]) -> Network:
    kernels = []
    for name in ("K1", "K2"):
        kernel = given[name]
        layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2:], bias=False)  # type: ignore[arg-type]
        layer.weight = nn.Parameter(kernel.clone())
        kernels.append(layer)
    rest = nn.Sequential(nn.Flatten(), linear(given["A"]))
    features = nn.Sequential(OrderedDict(first=kernels[0], second=kernels[1], rest=rest))
    stages = {"first": "features.first", "second": "features.second"}
    return Network(features, linear(given["G"]), embedding_size=4, classes=3, stages=stages, alignment_stages=())


@compares("federated", "mcsad_1")
def test_a_step_of_mcsad(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    heads = [{"weight": weight} for weight in given["heads"]]
    wrong: list[Tensor] = []
    move = HardStyle.move
    monkeypatch.setattr(
        HardStyle, "move", lambda self, loss, rate: (wrong.append(loss.detach()), move(self, loss, rate))[1]
    )
    assert options["supcon temperature"] == mcsad.CONTRAST

    def loss(contrast: float, agreement: float) -> tuple[Tensor, Network]:
        method = MCSAD(
            setting="released",
            style_rate=options["eta"],
            contrast_weight=contrast,
            agreement_weight=agreement,
            temperature=options["tau"],
        )
        model = of_two_stages(dict(given))
        return method.loss_beside(SITE, model, cast(Any, heads))(batch(given["x"], reference.inputs["labels"])), model

    plain = loss(0.0, 0.0)[0]
    reference.agree("loss of the first style", wrong[0])
    reference.agree("loss of the second style", wrong[1])
    reference.agree("task loss", plain)
    reference.agree("alignment, weighted", loss(options["lambda_sup"], 0.0)[0] - plain)
    reference.agree("distillation, weighted", loss(0.0, options["lambda_kd"])[0] - plain)
    whole, model = loss(options["lambda_sup"], options["lambda_kd"])
    reference.agree("loss", whole)
    whole.backward()  # type: ignore[no-untyped-call]
    first, *others = model.parameters()
    assert first.grad is None  # no gradient passes the normalised maps
    reference.agree("K1 after the step", first)
    for letter, parameter in zip(("K2", "A", "G"), others, strict=True):
        reference.agree(f"{letter} after the step", stepped(parameter, options["rate"]))
