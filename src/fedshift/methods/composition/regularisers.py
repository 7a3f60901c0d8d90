"""Plug-ins that make training harder inside the network: sharpness-aware steps, dropout, stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.errors import UserError
from fedshift.federation.site import Batch, LossOf, PlugIn, Site
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.models.network import Network

Rate = Annotated[float, Field(ge=0, lt=1)]


class Sharpness(BaseModel):
    """The options of sharpness-aware steps."""

    radius: NonNegativeFloat = Field(0.05, description="ρ: how far away the loss is looked at")
    adaptive: bool = Field(False, description="ASAM: distances relative to each weight")
    eta: PositiveFloat = Field(0.2, description="η of ASAM")
    scaled_biases: bool = Field(True, description="ASAM: T = |θ| + η of biases too (code: 1)")


class SharpnessOption(Sharpness, LocalOption):
    """Sharpness-aware steps (SAM, ASAM): the gradient of L is taken at ``θ + ε``, where L is worst nearby.

    BatchNorm's statistics move at both, as in `fedsam`.
    """

    cost = 1.0

    name: Literal["sharpness"] = "sharpness"

    def at(self, site: Site) -> PlugIn:
        return _Sharpness(site, self)


class _LossAt(nn.Module):
    """A loss as a module, so that `functional_call` can give its model other parameters."""

    def __init__(self, model: Network, loss_of: LossOf) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, batch: Batch) -> Tensor:
        return self.loss_of(batch)


class _Sharpness(PlugIn):
    name = "sharpness"

    def __init__(self, site: Site, option: SharpnessOption) -> None:
        super().__init__(site)
        self._option = option

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        assert self.model is not None
        option = self._option
        if option.radius == 0:
            return loss_of(batch)
        parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        gradients = torch.autograd.grad(
            loss_of(batch), list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        there = worst_nearby(
            parameters,
            gradients,
            option.radius,
            adaptive=option.adaptive,
            eta=option.eta,
            biases=option.scaled_biases,
        )
        loss: Tensor = functional_call(
            _LossAt(self.model, loss_of), {f"model.{name}": value for name, value in there.items()}, (batch,)
        )
        return loss


class DropoutOption(LocalOption):
    """Dropout of the features before the classifier (Srivastava et al., JMLR 2014)."""

    cost = 0.0

    name: Literal["dropout"] = "dropout"
    rate: Rate = Field(0.5, description="probability that a feature is 0; the others grow by 1/(1 − rate)")

    def at(self, site: Site) -> PlugIn:
        return _Dropout(site, self)


class _Dropout(PlugIn):
    name = "dropout"

    def __init__(self, site: Site, option: DropoutOption) -> None:
        super().__init__(site)
        self._rate, self._draws = option.rate, site.generator_for("dropout")

    @contextmanager
    def attach(self, model: Network) -> Iterator[None]:
        handle = model.classifier.register_forward_pre_hook(self._drop)
        try:
            yield
        finally:
            handle.remove()

    def _drop(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not module.training:
            return None
        features, *others = inputs
        kept = torch.rand(features.shape, generator=self._draws) >= self._rate
        return (features * kept.to(features) / (1 - self._rate), *others)


class StochasticDepthOption(LocalOption):
    """Stochastic depth (Huang et al., ECCV 2016): for some samples a residual block is only its short cut.

    The probability grows linearly from the first block to ``rate`` at the last. What is kept grows by 1/(1 − rate), so
    that nothing changes in evaluation.
    """

    cost = 0.0

    name: Literal["stochastic_depth"] = "stochastic_depth"
    rate: Rate = Field(0.2, description="probability at the last block")

    def at(self, site: Site) -> PlugIn:
        return _StochasticDepth(site, self)

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        if not residual_branches(network):
            raise UserError(f"{self.name}: the network has no residual blocks, as ResNets have; leave it out")


class _StochasticDepth(PlugIn):
    name = "stochastic_depth"

    def __init__(self, site: Site, option: StochasticDepthOption) -> None:
        super().__init__(site)
        self._rate, self._draws = option.rate, site.generator_for("stochastic depth")

    @contextmanager
    def attach(self, model: Network) -> Iterator[None]:
        branches = residual_branches(model)
        handles = [
            branch.register_forward_hook(self._hook(self._rate * number / len(branches)))
            for number, branch in enumerate(branches, 1)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, rate: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
            if not module.training:
                return output
            kept = torch.rand(len(output), generator=self._draws) >= rate
            return output * (kept.to(output) / (1 - rate)).view(-1, *[1] * (output.dim() - 1))

        return drop


def residual_branches(network: nn.Module) -> list[nn.Module]:
    """The last module of the branch of each residual block, whose output is added to the block's input.

    They are known by torchvision's names: ``conv`` of an inverted residual block with ``use_res_connect``, the last
    BatchNorm of a ResNet's block.
    """
    result: list[nn.Module] = []
    for block in network.modules():
        if getattr(block, "use_res_connect", False):
            result.append(block.get_submodule("conv"))
        elif hasattr(block, "downsample") and hasattr(block, "bn2"):
            result.append(block.get_submodule("bn3" if hasattr(block, "bn3") else "bn2"))
    return result


def worst_nearby(
    parameters: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
    radius: float,
    *,
    adaptive: bool,
    eta: float = 0.2,
    biases: bool = True,
) -> dict[str, Tensor]:
    """``θ + ε`` with ``ε = ρ g/‖g‖`` (SAM) or ``ε = ρ T²g/‖Tg‖, T = |θ| + η`` (ASAM).

    ε is a constant for back-propagation, so a gradient taken at θ + ε arrives at θ. Sources: Foret, Kleiner, Mobahi,
    Neyshabur (ICLR 2021, equation 2); Kwon, Kim, Park, Choi (ICML 2021, equation 4).
    """
    scales = [
        value.detach().abs() + eta if adaptive and (biases or "weight" in name) else torch.ones_like(value)
        for name, value in parameters.items()
    ]
    scaled = [scale * gradient.detach() for scale, gradient in zip(scales, gradients, strict=True)]
    norm = torch.stack([tensor.square().sum() for tensor in scaled]).sum().sqrt().clamp_min(1e-12)
    moves = [radius * scale * tensor / norm for scale, tensor in zip(scales, scaled, strict=True)]
    return {name: value + move for (name, value), move in zip(parameters.items(), moves, strict=True)}
