"""FedADG: align every site's features with one reference distribution (Zhang et al., arXiv 2021).

A discriminator answers D ∈ (0, 1). Generated features h' are its real class, extracted features h its fake class. All
losses are means over a batch, without unit.
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
    """Loss of the discriminator, a scalar. Both forms are least at D(h') = 1, D(h) = 0.

    Args:
        generated: ``D(h'|y)``, any shape.
        extracted: ``D(h|y)``, any shape.
        form: ``"least_squares"`` is ``E (1 − D(h'))² + E D(h)²`` (PACS code). ``"formula"`` is
            ``−E[D(h')² + (1 − D(h))²]`` (paper and VLCS code).

    Raises:
        UserError: one of them is empty.

    Example:
        >>> discriminator_loss(torch.tensor([0.5]), torch.tensor([0.5]))
        tensor(0.5000)
    """
    _check(generated, extracted)
    if form == "formula":
        return -(generated.square().mean() + (1 - extracted).square().mean())
    return (1 - generated).square().mean() + extracted.square().mean()


def alignment_loss(extracted: Tensor) -> Tensor:
    """Loss of the feature extractor while D is fixed, ``E (1 − D(h|y))²``, a scalar.

    Args:
        extracted: ``D(h|y)``, any shape.

    Raises:
        UserError: it is empty.

    Example:
        >>> alignment_loss(torch.tensor([0.5]))
        tensor(0.2500)
    """
    _check(extracted)
    return (1 - extracted).square().mean()


def reference_loss(generated: Tensor, form: Literal["formula", "towards_features"] = "formula") -> Tensor:
    """Loss of the generator while D is fixed, a scalar.

    Args:
        generated: ``D(h'|y)``, any shape.
        form: ``"formula"`` is ``E (1 − D(h'))²``. ``"towards_features"`` is ``E D(h')²`` (PACS code), which moves the
            reference to where the features of all sites are.

    Raises:
        UserError: it is empty.

    Example:
        >>> answer = torch.tensor([0.1])
        >>> reference_loss(answer), reference_loss(answer, "towards_features")
        (tensor(0.8100), tensor(0.0100))
    """
    _check(generated)
    return (1 - generated).square().mean() if form == "formula" else generated.square().mean()


def total_loss(task: Tensor, alignment: Tensor, weight: float = 0.15) -> Tensor:
    """Loss of extractor and classifier, ``(1 − λ)·L_err + λ·L_F``, a scalar.

    Args:
        task: L_err.
        alignment: L_F.
        weight: λ.

    Example:
        >>> total_loss(torch.tensor(2.0), torch.tensor(1.0), weight=0.25)
        tensor(1.7500)
    """
    return (1 - weight) * task + weight * alignment


def scaled_one_hot(labels: Tensor, classes: int, value: float = 0.7) -> Tensor:
    """The condition y of generator and discriminator: ``value`` at the label, 0 elsewhere.

    Args:
        labels: (n,) int64.
        classes: C.
        value: the number at the label.

    Returns:
        (n, C) float32.

    Example:
        >>> scaled_one_hot(torch.tensor([1]), 3)
        tensor([[0.0000, 0.7000, 0.0000]])
    """
    return value * functional.one_hot(labels, classes).float()


def random_projection(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """A random matrix (outputs, inputs), divided by its Frobenius norm.

    Raises:
        UserError: a size below 1.

    Example:
        >>> matrix = random_projection(3, 2, torch.Generator().manual_seed(0))
        >>> matrix.shape, matrix.square().sum().round(decimals=4)
        (torch.Size([2, 3]), tensor(1.))
    """
    if min(inputs, outputs) < 1:
        raise UserError(f"a random projection needs sizes of at least 1, found {inputs} and {outputs}")
    return functional.normalize(torch.randn(outputs * inputs, generator=generator), dim=0).view(outputs, inputs)


def _check(*answers: Tensor) -> None:
    if not all(answer.numel() for answer in answers):
        raise UserError("the losses of FedADG need the discriminator's answer to at least one sample")
