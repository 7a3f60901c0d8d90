"""MixStyle at work: behind some stages of a network, the styles of samples are mixed (see `methods.pooled.mixstyle`).

A site of a federation has one domain, so partners are drawn at random. Mixing across domains is for pooled methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, PositiveFloat
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedshift.errors import UserError, nearest
from fedshift.federation.site import PlugIn, Site
from fedshift.functional.styles import channel_styles
from fedshift.methods.composition.plug_in import LocalOption, check_images, maps_of
from fedshift.models.network import Network

STEM = "stem"
"""What stands before a network's blocks. The authors mix behind blocks alone (ResNet.featuremaps, resnet18_ms_l123)."""


class Mixing(BaseModel):
    """The options of MixStyle."""

    probability: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="p: of mixing in a forward pass")
    alpha: PositiveFloat = Field(0.1, description="α of λ ~ Beta(α, α)")
    partners: Literal["random", "cross_domain"] = Field("random", description="whose style a sample is mixed with")
    stages: tuple[str, ...] | None = Field(
        None, description="behind which stages; none = all with positions but the stem and the last"
    )


class MixStyleOption(Mixing, LocalOption):
    """MixStyle (Zhou et al., ICLR 2021): the feature statistics of samples of a site's mini-batch are mixed."""

    cost = 0.1

    name: Literal["mixstyle"] = "mixstyle"

    @property
    def of_two_domains(self) -> bool:
        return self.partners == "cross_domain"

    def at(self, site: Site) -> PlugIn:
        return _MixStyle(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        check_images(self.name, input_shape, "vectors have no statistics over positions")
        for stage in self.stages or ():
            if stage not in network.stages:
                raise UserError(f"{self.name}.stages: there is no stage '{stage}'; {nearest(stage, network.stages)}")
        maps = maps_of(network, tuple(_stages_to_mix(network, self.stages)), input_shape)
        if not any(len(shape) == 3 and shape[1] * shape[2] > 1 for shape in maps.values()):
            raise UserError(f"{self.name}: no stage of the network gives maps with positions to mix; leave it out")


class _MixStyle(PlugIn):
    name = "mixstyle"

    def __init__(self, site: Site, option: MixStyleOption) -> None:
        super().__init__(site)
        self._stages = option.stages
        draws = site.generator_for("mixstyle")
        self._mixer = Mixer(option.probability, option.alpha, draws, across=option.of_two_domains)

    @contextmanager
    def attach(self, model: Network) -> Iterator[None]:
        handles = self._mixer.attach(model, self._stages)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Mixer:
    """Mixes the styles of a network's stages in training mode.

    ``alpha``: α. ``draws``: draws whether to mix, λ and the partners. ``across``: whether a partner is of the other
    half of the batch, which is of another domain; else of the batch.
    """

    def __init__(self, probability: float, alpha: float, draws: torch.Generator, across: bool) -> None:
        self.probability, self.alpha, self.draws, self.across = probability, alpha, draws, across

    def attach(self, model: Network, stages: tuple[str, ...] | None) -> list[RemovableHandle]:
        """Mix behind these stages of ``model``; None: behind all that have positions, but ``stem`` and the last."""
        return [
            model.get_submodule(model.stages[name]).register_forward_hook(self._mix)
            for name in _stages_to_mix(model, stages)
        ]

    def _mix(self, module: torch.nn.Module, _: object, maps: Tensor) -> Tensor:
        if not module.training or maps.dim() != 4 or maps[0, 0].numel() < 2:
            return maps
        if torch.rand((), generator=self.draws) >= self.probability:
            return maps
        drawn = partners_in_the_other_half if self.across else shuffle_rows
        return mixed_styles(
            maps, drawn(len(maps), self.draws).to(maps.device), beta(self.alpha, len(maps), self.draws).to(maps)
        )


def _stages_to_mix(network: Network, stages: tuple[str, ...] | None) -> list[str]:
    if stages is not None:
        return list(stages)
    return [name for name in list(network.stages)[:-1] if name != STEM]


def shuffle_rows(number: int, generator: torch.Generator) -> Tensor:
    """Row numbers in a random order, (n,)."""
    return torch.randperm(number, generator=generator)


def beta(alpha: float, number: int, draws: torch.Generator) -> Tensor:
    """``number`` draws of Beta(α, α), (n,): the share of one of two Gamma(α) draws."""
    # Jöhnk: U^(1/α) and V^(1/α), accepted where their sum is at most one; in logarithms, since α is small.
    result = torch.empty(0)
    while len(result) < number:
        logs = torch.rand(2, 4 * number, generator=draws, dtype=torch.float64).log() / alpha
        total = torch.logaddexp(logs[0], logs[1])
        result = torch.cat([result, (logs[0] - total).exp()[total <= 0]])
    return result[:number]


def mixed_styles(maps: Tensor, order: Tensor, weights: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``σ_mix (x − μ)/σ + μ_mix`` with ``σ_mix = λσ + (1−λ)σ'`` and ``μ_mix = λμ + (1−λ)μ'``, per sample and channel.

    ``σ = sqrt(var + ε)`` with the unbiased variance over positions. Means and deviations are constants for
    back-propagation. Source: MixStyle (Zhou, Yang, Qiao, Xiang, ICLR 2021, equations 3 to 5).
    """
    if maps.dim() != 4 or not order.shape == weights.shape == maps.shape[:1] or maps[0, 0].numel() < 2:
        raise UserError(
            f"styles mix in feature maps (n, c, h, w) of more than one position with n partners and n weights, found "
            f"{tuple(maps.shape)}, {tuple(order.shape)} and {tuple(weights.shape)}"
        )
    means, deviations = channel_styles(maps.detach(), epsilon, unbiased=True)
    mean, deviation = (torch.lerp(moments[order], moments, weights[:, None]) for moments in (means, deviations))
    scale = deviation / deviations
    return torch.addcmul((mean - means * scale)[:, :, None, None], maps, scale[:, :, None, None])


def partners_in_the_other_half(number: int, generator: torch.Generator) -> Tensor:
    """A partner for each sample: the other half of the batch, in a random order (MixStyle "with domain label").

    Each sample is the partner of one other, so half a batch of one domain takes the styles of a half of another.
    Source: Dassl.pytorch, dassl/modeling/ops/mixstyle.py, MixStyle.forward, ``crossdomain``.
    """
    half = number // 2
    first, second = torch.randperm(half, generator=generator), half + torch.randperm(number - half, generator=generator)
    if half == 0:
        return second
    return torch.cat([second[:half], first, first[: number - 2 * half]])
