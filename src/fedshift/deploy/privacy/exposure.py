"""Watches a call train at a site, and computes how far its update would show single samples.

While a call runs, every layer with weights is watched as it trains: what each sample adds to the update of each unit.
BatchNorm's running means leave a site, too, so they are watched as well: how far each sample moves the mean of each
channel. This works for every method and every network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from fedshift.federation.site import Site
from fedshift.functional.exposure import exposure, largest_shares
from fedshift.models.wide import WideLinear

_WATCHED = 1024
"""Most samples of a site that are watched; of a larger site every second or third one is, and so on."""
GROUPS = (2, 4, 8, 16)
_WORK = 5e6
"""Numbers to look at for differences of units, in all layers together."""


class ExposureWatch:
    """Watches the layers that train inside a ``with`` block; `score` says afterwards what their updates show.

    Layers whose shapes do not occur in the site's network are left out: they belong to what a method keeps at the site,
    such as a decoder.
    """

    def __init__(self, site: Site) -> None:
        self._data = site.data
        self._views = [view for view in (site.data, site.unlabelled, site.held_out) if view is not None]
        self._shapes = {tuple(tensor.shape) for tensor in site.network.state_dict().values()}
        self._step = -(-site.samples // _WATCHED)
        self._contributions: dict[nn.Module, Tensor] = {}
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> ExposureWatch:
        for view in self._views:
            view.watch()
        self._handle = register_module_forward_hook(self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.remove()

    def samples(self) -> int:
        """How many samples were read. A call that read none sends what an earlier one computed from all, or nothing."""
        return sum(int(view.seen.sum()) for view in self._views if view.seen is not None) or self._data.samples

    def score(self) -> float:
        """The exposure of the layer that shows most, 0 to 1; 0 if nothing was trained."""
        work = _WORK / max(1, len(self._contributions))
        scores = [0.0]
        for module, result in self._contributions.items():
            rows = result
            if isinstance(module, _BatchNorm):
                used = result[result.abs().amax(1) > 0]  # a sample that was not read moves no mean
                rows = used - used.median(0).values if len(used) else used
            # A filter's contribution is a size without sign, so several filters do not cancel each other.
            together = () if isinstance(module, _BatchNorm | _ConvNd) else GROUPS
            scores.append(exposure(largest_shares(rows, together, work, self._step)))
        return max(scores)

    def _forward(self, module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> None:
        if isinstance(module, _BatchNorm):
            if module.training and module.track_running_stats:
                self._add(module, inputs[0].detach().flatten(2).mean(2) if inputs[0].dim() > 2 else inputs[0].detach())
        elif (
            isinstance(module, nn.Linear | WideLinear | _ConvNd)
            and output.requires_grad
            and module.weight.requires_grad
            and tuple(module.weight.shape) in self._shapes
        ):
            # The gradient of a unit's weights is the sum over samples of the unit's own gradient times the input.
            size = (1 + inputs[0].detach().flatten(1).square().sum(1, keepdim=True)).sqrt()
            filters = isinstance(module, _ConvNd)

            def backward(gradient: Tensor) -> None:
                units = gradient.detach()
                if filters:
                    units = torch.linalg.vector_norm(units.flatten(2), dim=2)
                self._add(module, units.flatten(1) * size)

            output.register_hook(backward)  # type: ignore[no-untyped-call]

    def _add(self, module: nn.Module, contributions: Tensor) -> None:
        """Add what the samples of a mini-batch contribute to the units of ``module``."""
        rows = self._rows(len(contributions))
        kept = rows % self._step == 0
        rows, kept = rows.to(contributions.device), kept.to(contributions.device)
        if module not in self._contributions:
            number = -(-self._data.samples // self._step)
            self._contributions[module] = contributions.new_zeros(number, contributions.shape[1], dtype=torch.float32)
        self._contributions[module].index_add_(0, rows[kept] // self._step, contributions[kept].float())

    def _rows(self, number: int) -> Tensor:
        """The site's rows that a mini-batch of ``number`` samples was made of: those read last, once or several times.

        If no batches that were read fit, the mini-batch counts as that many different samples.
        """
        last: list[Tensor] = []
        for rows in reversed(self._data.read):
            last.insert(0, rows)
            together = sum(map(len, last))
            if together and number % together == 0:
                return torch.cat(last).repeat(number // together)
            if together > number:
                break
        return torch.arange(number) % self._data.samples
