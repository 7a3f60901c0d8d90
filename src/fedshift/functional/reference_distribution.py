"""FedADG: features of every site against one reference distribution (Zhang et al., arXiv 2021).

A discriminator answers D ∈ (0, 1); generated features h' are its real class, extracted features h its fake one. All
losses are means over a batch and numbers without unit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError


def discriminator_loss(
    generated: Tensor, extracted: Tensor, form: Literal["least_squares", "formula"] = "least_squares"
) -> Tensor:
    """What the discriminator minimises, a scalar, from D(h'|y) and D(h|y).

    ``"least_squares"``: ``E (1 − D(h'))² + E D(h)²`` (PACS code). ``"formula"``: ``−E[D(h')² + (1 − D(h))²]`` (paper
    and VLCS code). Both are least at D(h') = 1, D(h) = 0.
    generated, extracted: any shapes. Raises UserError when one of them is empty.
    """
    _check(generated, extracted)
    if form == "formula":
        return -(generated.square().mean() + (1 - extracted).square().mean())
    return (1 - generated).square().mean() + extracted.square().mean()


def alignment_loss(extracted: Tensor) -> Tensor:
    """``E (1 − D(h|y))²``, a scalar that the feature extractor minimises, D fixed."""
    _check(extracted)
    return (1 - extracted).square().mean()


def reference_loss(generated: Tensor, form: Literal["formula", "towards_features"] = "formula") -> Tensor:
    """What the generator minimises, a scalar, from D(h'|y), D fixed.

    ``"formula"``: ``E (1 − D(h'))²``. ``"towards_features"``: ``E D(h')²`` (PACS code), which moves the reference to
    where the features of all sites are.
    """
    _check(generated)
    return (1 - generated).square().mean() if form == "formula" else generated.square().mean()


def total_loss(task: Tensor, alignment: Tensor, weight: float = 0.15) -> Tensor:
    """``(1 − λ)·L_err + λ·L_F`` of extractor and classifier, a scalar."""
    return (1 - weight) * task + weight * alignment


def scaled_one_hot(labels: Tensor, classes: int, value: float = 0.7) -> Tensor:
    """The condition y: (n,) int64 → (n, C) float32, ``value`` at the label and 0 elsewhere."""
    return value * functional.one_hot(labels, classes).float()


def random_projection(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """A random matrix (outputs, inputs) divided by its Frobenius norm. Raises UserError for a size of
    0."""
    if min(inputs, outputs) < 1:
        raise UserError(f"a random projection needs sizes of at least 1, found {inputs} and {outputs}")
    return functional.normalize(torch.randn(outputs * inputs, generator=generator), dim=0).view(outputs, inputs)


def _check(*answers: Tensor) -> None:
    if not all(answer.numel() for answer in answers):
        raise UserError("the losses of FedADG need the discriminator's answer to at least one sample")
