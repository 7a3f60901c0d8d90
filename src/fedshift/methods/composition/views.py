"""Plug-ins that change what the method sees of each mini-batch: moved images, other amplitudes, a step up the loss.

`AugmentOption` takes the place of the samples. The others add a view to them:

    L = (1 − s) L(x) + s L(x')

L is the method's own loss. Since the shares sum to one, its penalties keep their weight.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.data.transforms import NamedAugmentation, augment_with_masks
from fedshift.federation.site import Batch, LossOf, PlugIn, Site, with_labelled
from fedshift.functional.mixing import gradient_perturbed
from fedshift.functional.spectra import amplitude, interpolate_amplitudes
from fedshift.methods.composition.plug_in import LocalOption, check_images
from fedshift.models.network import Network

Share = Annotated[float, Field(ge=0, le=1)]


class _SecondView(PlugIn):
    changes_inputs = True
    share: float

    @abstractmethod
    def view(self, batch: Batch) -> Tensor:
        """x'."""

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        if self.share == 0:
            return loss_of(batch)
        other = replace(batch, inputs=self.view(batch))
        if self.share == 1:
            return loss_of(other)
        return (1 - self.share) * loss_of(batch) + self.share * loss_of(other)


class AmplitudeMixOption(LocalOption):
    """FACT's amplitude mix without its teacher (Xu et al., CVPR 2021): amplitudes mix within a site's mini-batch."""

    cost = 1.1

    name: Literal["amplitude_mix"] = "amplitude_mix"
    strength: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="η: the largest λ")
    share: Share = Field(0.5, description="s: weight of the mixed images")

    def at(self, site: Site) -> PlugIn:
        return _AmplitudeMix(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_images(self.name, input_shape, "vectors have no spectrum")


class _AmplitudeMix(_SecondView):
    name = "amplitude_mix"

    def __init__(self, site: Site, option: AmplitudeMixOption) -> None:
        super().__init__(site)
        self.share, self._strength = option.share, option.strength
        self._draws = site.generator_for("amplitude mix")

    def view(self, batch: Batch) -> Tensor:
        return amplitude_mixed(self.site, batch.inputs, self._strength, self._draws)


def amplitude_mixed(site: Site, inputs: Tensor, strength: float, draws: torch.Generator) -> Tensor:
    """x̂ of FACT (3–5): the amplitude of another image of the batch, mixed in by λ ~ U(0, strength)."""
    pixels = site.pixels(inputs)
    order = torch.randperm(len(pixels), generator=draws).to(pixels.device)
    rate = strength * torch.rand(len(pixels), 1, 1, 1, generator=draws).to(pixels)
    return site.inputs_of(interpolate_amplitudes(pixels, amplitude(pixels[order]), rate, half=None).clamp(0, 1))


class AugmentOption(LocalOption):
    """Random changes of training images, as ``training.augmentation`` has them, for one method of an experiment."""

    cost = 0.2

    name: Literal["augment"] = "augment"
    by: NamedAugmentation = Field(
        description="the augmentation, a preset's name or its parts: fedshift fields training"
    )

    def at(self, site: Site) -> PlugIn:
        return _Augment(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_images(self.name, input_shape, "vectors cannot be moved or recoloured")


class _Augment(PlugIn):
    name = "augment"
    changes_inputs = True

    def __init__(self, site: Site, option: AugmentOption) -> None:
        super().__init__(site)
        self._by, self._draws = option.by, site.generator_for("augment")

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        return loss_of(with_labelled(batch, self._augment))

    def _augment(self, batch: Batch) -> Batch:
        pixels, labels = self.site.pixels(batch.inputs).clamp(0, 1), batch.targets
        masks = labels if labels.dim() == 4 else None
        pixels, masks = augment_with_masks(pixels, masks, self._by, self._draws)
        return replace(batch, inputs=self.site.inputs_of(pixels), labels=labels if masks is None else masks)


class LabelGradientOption(LocalOption):
    """CrossGrad's label side (Shankar et al., ICLR 2018, there as LabelGrad): inputs move up the label's loss.

    CrossGrad itself moves them up the loss of a domain network, which needs samples of more than one domain.
    """

    cost = 2.0

    name: Literal["label_gradient"] = "label_gradient"
    perturbation: NonNegativeFloat = Field(1.0, description="ε: how far samples move")
    clip: PositiveFloat = Field(0.1, description="bound of the gradient in each entry")
    share: Share = Field(0.5, description="s: weight of the moved samples")

    def at(self, site: Site) -> PlugIn:
        return _LabelGradient(site, self)


class _LabelGradient(_SecondView):
    name = "label_gradient"

    def __init__(self, site: Site, option: LabelGradientOption) -> None:
        super().__init__(site)
        self.share, self._size, self._clip = option.share, option.perturbation, option.clip

    def view(self, batch: Batch) -> Tensor:
        assert self.model is not None
        probe = batch.inputs.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.site.objective.loss(self.model(probe), batch.targets), probe)
        return gradient_perturbed(batch.inputs, gradient, self._size, self._clip)
