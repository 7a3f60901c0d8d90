"""Private training: steps on clipped per-sample gradients with noise (DP-SGD), whatever the method's loss is.

Abadi et al.: Deep Learning with Differential Privacy. ACM CCS 2016, Algorithm 1.

    w ← w − η · ( Σ_u clip(g_u, C) + σC·N(0, 1) ) / E|batch|        over the units u of a Poisson batch

A unit is a sample, or where the data name groups all samples of one. Opacus computes the gradients of single samples
with hooks on the network's layers.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation.randomness import drawn_from
from fedshift.federation.site_base import Batch, SiteBase
from fedshift.functional.differential_privacy import clipped_sum, gaussian, sample_rate
from fedshift.models.made_up import made_up, reads_tokens
from fedshift.models.network import Network
from fedshift.models.wide import WideLinear

_SAMPLES = 3
"""Samples on which a network is tried before training."""
_AGREES = 0.01
"""Largest difference between a batch's gradient and that of its samples, beside the samples' norms; what a graphics
processor rounds off is less."""


def minimise_privately(
    site: SiteBase,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    modules: Sequence[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    remember: str | None = None,
    regulariser: Callable[[], Tensor] | None = None,
) -> float:
    """`Site.minimise`, private: a noisy step for each mini-batch.

    ``batches``: of `Site.batches`; each has another number in `Site.mini_batches`. ``loss_of``: the mean of a loss of
    each sample. ``optimizers``: as of `Site.minimise`. ``remember``: as of `Site.minimise`. ``regulariser``: what the
    loss has beside the samples' part. It needs no noise. Returns 0 in place of the loss, which is computed from samples
    and may not leave the site. Raises FedshiftError: the loss has another part that depends on no sample, or the site
    has no noise. Raises TrainingDiverged: the weights are no longer finite.
    """
    privacy, draws, data = site.training.privacy, site.draws, site.data
    if privacy is None or draws is None:
        raise FedshiftError("private training needs training.privacy and a source of noise")
    steppers = list(optimizers) if optimizers is not None else [site.optimizer(*modules, memory=remember)]
    units = data.samples if data.groups is None else int(data.groups.max()) + 1
    expected = sample_rate(data.samples, site.training.batch_size) * units
    parameters = [value for module in modules for value in module.parameters() if value.requires_grad]
    with per_sample_gradients(*modules):
        for batch in batches:
            for optimizer in steppers:
                optimizer.zero_grad(set_to_none=True)
            sums = _clipped_sums(site, batch, loss_of, parameters, privacy.clip_norm, compared=draws.compares)
            noise = draws.generator(site.envelope.exchange, f"noise {site.mini_batches}")
            for value, total in zip(parameters, sums, strict=True):
                noisy = total.cpu().double() + draws.noise_multiplier * privacy.clip_norm * gaussian(value.shape, noise)
                value.grad = torch.empty_like(value).copy_(noisy / expected)
                _forget(value)
            if regulariser is not None:
                _pull(parameters, regulariser())
            for optimizer in steppers:
                optimizer.step()
    if not all(bool(value.isfinite().all()) for value in parameters):
        raise TrainingDiverged(
            f"training turned to nan at site '{site.name}' in round {site.envelope.round} with learning rate "
            f"{site.learning_rate:g}: lower training.lr"
        )
    if remember is not None:
        site.remember_optimizer(steppers[0], remember)
    return 0.0


def _clipped_sums(
    site: SiteBase,
    batch: Batch,
    loss_of: Callable[[Batch], Tensor],
    parameters: list[nn.Parameter],
    clip_norm: float,
    *,
    compared: bool,
) -> list[Tensor]:
    """The sum over a mini-batch of each sample's gradient, or each group's, clipped; 0 where it has no sample."""
    if not len(batch.rows):
        return [torch.zeros_like(value) for value in parameters]
    loss_of(batch).backward()  # type: ignore[no-untyped-call]
    gradients = gradients_of(parameters, len(batch.rows), compared=compared)
    groups = None if site.data.groups is None else site.data.groups[batch.rows]
    return clipped_sum(gradients, clip_norm, groups)


def _pull(parameters: Sequence[nn.Parameter], loss: Tensor) -> None:
    """Add the gradient of a loss that depends on no sample."""
    for value, pull in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if pull is not None and value.grad is not None:
            value.grad += pull


@contextmanager
def per_sample_gradients(*modules: nn.Module) -> Iterator[None]:
    """Inside the block, the backward pass of a mean over a batch also leaves every sample's gradient."""
    kind = _hooks()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        hooks = [kind(module, strict=False) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.cleanup()


@functools.cache
def _hooks() -> Any:
    """Opacus's hooks, for the layers and the memory formats that there are here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from opacus.grad_sample import GradSampleHooks
        except ImportError:
            raise UserError("training.privacy needs opacus: pip install 'fedshift[privacy]'") from None

    class Hooks(GradSampleHooks):  # type: ignore[misc]
        GRAD_SAMPLERS = {  # noqa: RUF012 as in the base class
            **GradSampleHooks.GRAD_SAMPLERS,
            WideLinear: _of_wide_layer,
        }

        def rearrange_grad_samples(self, **options: Any) -> tuple[list[Tensor], Tensor]:
            """Opacus's gradients of convolutions are wrong for channels-last memory."""
            inputs, gradient = super().rearrange_grad_samples(**options)
            return [each.contiguous() for each in inputs], gradient.contiguous()

    return Hooks


def _of_wide_layer(layer: WideLinear, inputs: list[Tensor], gradient: Tensor) -> dict[nn.Parameter, Tensor]:
    return {layer.weight: torch.einsum("ni,no->nio", inputs[0], gradient), layer.bias: gradient}


def gradients_of(parameters: list[nn.Parameter], samples: int, *, compared: bool = True) -> list[Tensor]:
    """For each parameter the gradients of all samples, after a backward pass.

    ``compared``: whether they are compared with the gradient of the batch. Raises FedshiftError: together they are not
    the gradient of the batch.
    """
    gradients = []
    for value in parameters:
        each = getattr(value, "grad_sample", None)
        if each is None and value.grad is None:
            each = value.new_zeros((samples, *value.shape))  # the loss does not depend on it
        if not isinstance(each, Tensor) or len(each) != samples:
            raise FedshiftError("a layer gives no gradient for each sample")
        gradients.append(each.detach())
    if not compared:
        return gradients
    apart = [mean.sub(value.grad) for mean, value in zip((g.mean(0) for g in gradients), parameters, strict=True)
             if value.grad is not None]  # fmt: skip
    most = math.sqrt(sum(float(each.flatten(1).norm(dim=1).mean()) ** 2 for each in gradients))
    if math.sqrt(sum(float(item.norm()) ** 2 for item in apart)) > _AGREES * most + 1e-6:
        raise FedshiftError(
            "the gradients of the samples do not add up to that of the loss: a part that depends on no sample is the "
            "argument regulariser of Site.minimise"
        )
    return gradients


def check_network(network: Network, input_shape: tuple[int, ...]) -> None:
    """Try on random samples whether each sample's gradient is its own.

    Raises UserError: samples of a batch change each other's predictions, training changes more than parameters, or
    Opacus has no gradients for a layer.
    """
    network = copy.deepcopy(network).cpu().train()
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    with drawn_from(0):
        inputs, mixed = (
            _tokens_mix(network, input_shape) if reads_tokens(network) else _numbers_mix(network, input_shape)
        )
        changed = any(not torch.equal(buffers[name], value) for name, value in network.named_buffers())
        if changed or mixed:
            raise UserError(
                "model: the samples of a mini-batch change each other's predictions or the network's statistics, as "
                "BatchNorm does, which cannot be private: choose a network without it, such as mlp or mnist_cnn, or "
                "frozen with such a head"
            )
        try:
            with per_sample_gradients(network):
                scores = network(inputs)
                nn.functional.cross_entropy(scores, torch.arange(_SAMPLES) % scores.shape[1]).backward()  # type: ignore[no-untyped-call]
                gradients_of([value for value in network.parameters() if value.requires_grad], _SAMPLES)
        except UserError:
            raise
        except Exception as error:  # whatever a layer of a stranger raises inside of Opacus
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(f"model: its gradients of single samples cannot be computed ({reason})") from None


def _numbers_mix(network: Network, input_shape: tuple[int, ...]) -> tuple[Tensor, bool]:
    """Made-up samples, and whether a sample's scores depend on the others."""
    inputs = torch.randn(_SAMPLES, *input_shape, requires_grad=True)
    (pull,) = torch.autograd.grad(network(inputs)[0].sum(), inputs)
    return inputs.detach(), bool(pull[1:].any())


def _tokens_mix(network: Network, input_shape: tuple[int, ...]) -> tuple[Tensor, bool]:
    """The same of tokens, which have no gradient: the others change, and the sample's scores are compared."""
    inputs = made_up(network, _SAMPLES, input_shape, torch.Generator().manual_seed(0))
    others = torch.cat([inputs[:1], 1 - inputs[1:]])
    scores = []
    for samples in (inputs, others):
        with torch.no_grad(), drawn_from(0):
            scores.append(network(samples)[0])
    return inputs, not torch.equal(*scores)


def _forget(value: nn.Parameter) -> None:
    """Delete the samples' gradients. Otherwise Opacus would add the next ones to them."""
    value.grad_sample = None  # type: ignore[attr-defined]
