"""The steps of local training: a mini-batch's gradients, scaled in fp16 and clipped, and the optimisers' move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedshift.federation.training import Training

FIRST_SCALE = 2.0**12
"""What a loss is multiplied with in fp16 at the beginning of an exchange. torch's 2¹⁶ leaves out the first steps of
many networks, and here every exchange would begin so: a site keeps nothing of the scale, and is the same after a
resume."""


class Steps:
    """The steps of one exchange.

    In fp16 gradients below 6e-8 would be 0, so the loss is scaled (Micikevicius et al., Mixed Precision Training, ICLR
    2018) as `torch.amp.GradScaler` does it: a step whose gradients are not finite is left out, and the scale halves.
    """

    def __init__(self, training: Training, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers, self._clip_norm = optimizers, training.clip_norm
        scaled = training.precision == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE) if scaled else None

    def begin(self) -> None:
        """Forget the gradients of the last mini-batch."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # as zero_grad does, whose profiler's mark takes longer

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a loss."""
        whole = loss if self._scaler is None else self._scaler.scale(loss)
        whole.backward()  # type: ignore[no-untyped-call]

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of ``parameters`` together if the settings say so, and step."""
        moved = self._optimizers if self._scaler is None else [item for item in self._optimizers if _has_gradient(item)]
        if self._scaler is not None:
            for optimizer in moved:
                self._scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        for optimizer in moved:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None and moved:
            self._scaler.update()


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(value.grad is not None for group in optimizer.param_groups for value in group["params"])
