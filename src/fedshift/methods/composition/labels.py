"""Plug-ins that soften labels: label smoothing, mixup and CutMix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.site import Batch, LossOf, PlugIn, Site
from fedshift.functional.mixing import mixed_inputs, paste
from fedshift.methods.composition.mixstyle import beta
from fedshift.methods.composition.plug_in import LocalOption, check_images, check_numbers
from fedshift.models.network import Network


class LabelSmoothingOption(LocalOption):
    """Label smoothing (Szegedy et al., CVPR 2016): ``(1 − α) L + α · mean over classes of −log p``."""

    tasks = ("classification",)
    cost = 0.0

    name: Literal["label_smoothing"] = "label_smoothing"
    smoothing: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="α")

    def at(self, site: Site) -> PlugIn:
        return _LabelSmoothing(site, self)


class _LabelSmoothing(PlugIn):
    """The scores are those that the method's loss computed last, so there is no pass more."""

    name = "label_smoothing"

    def __init__(self, site: Site, option: LabelSmoothingOption) -> None:
        super().__init__(site)
        self._smoothing = option.smoothing
        self._scores: Tensor | None = None

    @contextmanager
    def attach(self, model: Network) -> Iterator[None]:
        handle = model.classifier.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
            self._scores = None

    def _keep(self, module: nn.Module, _: object, scores: Tensor) -> None:
        if scores.requires_grad:
            self._scores = scores

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        assert self.model is not None
        self._scores = None
        plain = loss_of(batch)
        scores = self.model(batch.inputs) if self._scores is None else self._scores
        loss: Tensor = (1 - self._smoothing) * plain - self._smoothing * scores.log_softmax(1).mean()
        return loss


class _Mixed(PlugIn):
    """``λ L(x̃, y) + (1 − λ) L(x̃, y')``, L being the method's; (x', y') are the mini-batch in another order."""

    changes_inputs = True

    def __init__(self, site: Site, option: MixupOption | CutMixOption) -> None:
        super().__init__(site)
        self._alpha, self._probability = option.alpha, option.probability
        self._draws = site.generator_for(self.name)

    @abstractmethod
    def mix(self, inputs: Tensor, partners: Tensor, share: float) -> tuple[Tensor, float]:
        """x̃, and λ."""

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        if torch.rand((), generator=self._draws) >= self._probability:
            return loss_of(batch)
        order = torch.randperm(len(batch.inputs), generator=self._draws).to(batch.inputs.device)
        share = float(beta(self._alpha, 1, self._draws))
        inputs, share = self.mix(batch.inputs, batch.inputs[order], share)
        mixed = replace(batch, inputs=inputs)
        if share == 1:
            return loss_of(mixed)
        return share * loss_of(mixed) + (1 - share) * loss_of(replace(mixed, labels=batch.targets[order]))


class MixupOption(LocalOption):
    """mixup (Zhang et al., ICLR 2018): ``x̃ = λx + (1 − λ)x'`` with one λ ~ Beta(α, α) for a mini-batch."""

    cost = 1.0

    name: Literal["mixup"] = "mixup"
    alpha: PositiveFloat = Field(0.2, description="α")
    probability: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="of mixing a mini-batch")

    def at(self, site: Site) -> PlugIn:
        return _Mixup(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_numbers(self.name, network)


class _Mixup(_Mixed):
    name = "mixup"

    def mix(self, inputs: Tensor, partners: Tensor, share: float) -> tuple[Tensor, float]:
        return mixed_inputs(inputs, partners, share), share


class CutMixOption(LocalOption):
    """CutMix (Yun et al., ICCV 2019): a rectangle of x' lies on x, and λ is the share of pixels that stay."""

    tasks = WITHOUT_MASKS
    cost = 1.0

    name: Literal["cutmix"] = "cutmix"
    alpha: PositiveFloat = Field(1.0, description="α of λ ~ Beta(α, α)")
    probability: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="of mixing a mini-batch")

    def at(self, site: Site) -> PlugIn:
        return _CutMix(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_images(self.name, input_shape, "vectors have no rectangles")


class _CutMix(_Mixed):
    name = "cutmix"

    def mix(self, inputs: Tensor, partners: Tensor, share: float) -> tuple[Tensor, float]:
        row, column = torch.rand(2, generator=self._draws).tolist()
        return paste(inputs, partners, share, (row, column))
