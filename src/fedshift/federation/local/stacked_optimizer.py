"""Optimiser steps of several sites at once: every operation is done for all sites together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedshift.federation.site import LocalFit


class StackedOptimizer:
    """SGD or Adam on stacked tensors.

    Each site has its own optimiser, as if it trained alone. Rates, settings and remembered momentum are read from it,
    and `keep` writes momentum back to it. So schedules, rates of layers and kept momentum need no code here.

    ``tensors``: the same, each with a row for every site. ``by_layer``: whether gradients come layer by layer, through
    `add`, or all together, through `take`.
    """

    def __init__(
        self,
        fits: Sequence[LocalFit],
        trainable: Sequence[Sequence[nn.Parameter]],
        tensors: Sequence[Tensor],
        by_layer: bool,
    ) -> None:
        self.fits, self.trainable, self.tensors = fits, trainable, tensors
        self.training = training = fits[0].site.training
        self.optimizers = [fit.site.optimizer(fit.model, memory=fit.remember) for fit in fits]
        owners = [
            {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
            for optimizer in self.optimizers
        ]
        self.groups = [[of[value] for value in values] for of, values in zip(owners, trainable, strict=True)]
        self.adam = training.optimizer == "adam"
        self.momentum = 0.0 if self.adam else training.momentum
        names = ("exp_avg", "exp_avg_sq") if self.adam else ("momentum_buffer",) if self.momentum else ()
        self.state = {name: [torch.zeros_like(whole) for whole in tensors] for name in names}
        self.done = torch.zeros(len(fits), device=tensors[0].device)
        self._load()
        # The products of a layer's gradient can be added to its momentum as they are made.
        self.regularised = regularised = any(fit.regulariser is not None for fit in fits)
        self.direct = (
            by_layer and self.momentum > 0 and not training.nesterov and training.clip_norm is None and not regularised
        )
        kept = regularised or (by_layer and not self.direct)
        self.slopes = [torch.zeros_like(whole) for whole in tensors] if kept else []
        self._rates: list[float | Tensor] | None = None
        self.shrink(len(fits))

    def _load(self) -> None:
        for index, (optimizer, parameters) in enumerate(zip(self.optimizers, self.trainable, strict=True)):
            for number, parameter in enumerate(parameters):
                entry = optimizer.state.get(parameter, {})
                for name, stacks in self.state.items():
                    if name in entry:
                        stacks[number][index] = entry[name]
                if "step" in entry:
                    self.done[index] = float(entry["step"])

    def shrink(self, number: int) -> None:
        """Go on with the first so many sites only."""
        self._values = [whole[:number] for whole in self.tensors]
        self._now = {name: [whole[:number] for whole in stacks] for name, stacks in self.state.items()}
        self._slopes = [whole[:number] for whole in self.slopes]
        self._done = self.done[:number]
        self._rates = None

    def add(self, layer: int, slopes: Tensor, reads: Tensor) -> None:
        """Take in the gradients of a linear layer.

        ``layer``: its number, from 0. ``slopes``: the gradients of what it gives, (sites, b, outputs). ``reads``: what
        it reads, (sites, b, inputs).
        """
        weight, bias = 2 * layer, 2 * layer + 1
        crossed = slopes.transpose(1, 2)
        if not self.direct:
            torch.bmm(crossed, reads, out=self._slopes[weight])
            torch.sum(slopes, 1, out=self._slopes[bias])
            return
        speed, of_bias = self._now["momentum_buffer"][weight], self._now["momentum_buffer"][bias]
        kept, decay = self.momentum, self.training.weight_decay
        of_bias.mul_(kept).add_(slopes.sum(1))
        if decay:
            of_bias.add_(self._values[bias], alpha=decay)
            speed.mul_(kept).add_(self._values[weight], alpha=decay)
            kept = 1.0
        torch.baddbmm(speed, crossed, reads, beta=kept, out=speed)

    def take(self, slopes: Sequence[Tensor]) -> None:
        """Take in the gradients of all tensors at the sites that go on."""
        if not self.regularised:
            self._slopes = list(slopes)
            return
        for kept, slope in zip(self._slopes, slopes, strict=True):  # to which those of a regulariser are added
            kept.copy_(slope)

    def step(self) -> None:
        """One step down the gradients that were taken in."""
        if self.training.clip_norm is not None:
            self._clip(self.training.clip_norm)
        self._done += 1
        for index, (values, rate) in enumerate(zip(self._values, self._rates_now(), strict=True)):
            way = self._now["momentum_buffer"][index] if self.direct else self._way(index)
            if isinstance(rate, float):
                values.add_(way, alpha=-rate)
            else:
                values.addcmul_(way, _by_site(rate, values), value=-1)

    def _way(self, index: int) -> Tensor:
        """The direction in which a tensor moves, before it is multiplied by the learning rate."""
        slope = self._slopes[index]
        if self.training.weight_decay:
            slope.add_(self._values[index], alpha=self.training.weight_decay)
        if self.adam:
            return self._by_adam(index, slope)
        if not self.momentum:
            return slope
        speed = self._now["momentum_buffer"][index].mul_(self.momentum).add_(slope)
        return slope.add_(speed, alpha=self.momentum) if self.training.nesterov else speed

    def _by_adam(self, index: int, slope: Tensor) -> Tensor:
        (beta1, beta2), eps = self.groups[0][index]["betas"], self.groups[0][index]["eps"]
        mean, square = (self._now[name][index] for name in ("exp_avg", "exp_avg_sq"))
        mean.lerp_(slope, 1 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        spread = square.div(_by_site(1 - beta2**self._done, square)).sqrt_().add_(eps)
        return mean.div(_by_site(1 - beta1**self._done, mean)).div_(spread)

    def _rates_now(self) -> list[float | Tensor]:
        """The learning rate of each tensor: one for all sites, or one for each of them."""
        if self._rates is None or self.training.lr_step == "mini_batch":
            by_site = [[group["lr"] for group in groups] for groups in self.groups[: len(self._done)]]
            self._rates = [
                rates[0] if len(set(rates)) == 1 else torch.tensor(rates, device=self.done.device)
                for rates in zip(*by_site, strict=True)
            ]
        return self._rates

    def _clip(self, most: float) -> None:
        """Shorten the gradients of the sites at which they are longer than ``most``, all tensors together."""
        norm = torch.stack([slope.flatten(1).square().sum(1) for slope in self._slopes]).sum(0).sqrt_()
        factor = (most / (norm + 1e-6)).clamp_max_(1.0)
        for slope in self._slopes:
            slope.mul_(_by_site(factor, slope))

    def keep(self) -> None:
        """Leave every site's momentum in its own optimiser, and in its memory if the experiment keeps it."""
        for index, (fit, optimizer) in enumerate(zip(self.fits, self.optimizers, strict=True)):
            if fit.site.mini_batches:
                for number, parameter in enumerate(self.trainable[index]):
                    entry = {name: stacks[number][index] for name, stacks in self.state.items()}
                    if self.adam:
                        entry["step"] = self.done[index]
                    optimizer.state[parameter] = entry
            if fit.remember is not None:
                fit.site.remember_optimizer(optimizer, fit.remember)


def _by_site(values: Tensor, like: Tensor) -> Tensor:
    """Values of the sites (sites,), reshaped so that they can be multiplied with ``like`` (sites, …)."""
    return values.view(-1, *([1] * (like.dim() - 1)))
