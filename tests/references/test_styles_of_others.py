"""A site's step of the methods that train on styles of other sites, and what leaves it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network
from torch import Tensor, nn

from fedshift.federation.messages import Styles
from fedshift.methods.federated import fedccrl
from fedshift.methods.federated.fedccrl import FedCCRL
from fedshift.models.network import Network

pytestmark = pytest.mark.usefixtures("double")


def site_of(images: Tensor) -> Any:
    """A site of these images, which are pixels as they stand."""
    return SimpleNamespace(
        name="here",
        samples=len(images),
        pixels=lambda inputs: inputs,
        inputs_of=lambda pixels: pixels,
        generator_for=lambda purpose: torch.Generator().manual_seed(0),
        data=SimpleNamespace(batch=lambda rows: (images[rows], None)),
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
        monkeypatch.setattr(FedCCRL, "_drawn", lambda *_: next(drawn))
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
        return fedccrl.augmixed(images.expand(4, 1, 2, 2), torch.Generator().manual_seed(seed))

    assert torch.equal(mixed(1), mixed(1))
    assert any(not torch.equal(mixed(1), mixed(seed)) for seed in (2, 3, 4))
    clipped = images.clamp(0, 1).expand(4, 1, 2, 2)
    assert torch.equal(mixed(1), fedccrl.augmixed(clipped, torch.Generator().manual_seed(1)))
