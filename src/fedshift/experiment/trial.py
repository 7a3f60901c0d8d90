"""A user's own method or network tried on made-up samples, so that a mistake in its file shows before training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedshift.data.domain import Domain, Inputs, Labels, Rows, SparseRows
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.costs import dry_run
from fedshift.experiment.plan import PlannedRun
from fedshift.federation.training import Training
from fedshift.models.made_up import made_up
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.own.forward_trial import SAMPLES, line_of, told_of

_SAMPLES = 8
"""Made-up samples of each domain."""
_MINI_BATCHES = 4
"""Mini-batches that each site may train on."""


def try_method(planned: PlannedRun, network: Network) -> None:
    """Run the start and two rounds of a method on made-up samples, with a few mini-batches at each site.

    ``network``: like that of the run's sites. It is not changed. UserError if the method fails. The message names the
    line of its file.
    """
    method, engine, data = planned.run.method, planned.experiment.engine, planned.data
    made = {name: _made_up(domain, len(data.classes)) for name, domain in data.domains.items()}

    def made_up_parts(parts: Sequence[tuple[Domain, Rows, int]]) -> list[tuple[Domain, Rows, int]]:
        return [(made[domain.name], np.arange(_SAMPLES, dtype=np.int64), number) for domain, _, number in parts]

    sites = [
        replace(
            site,
            parts=made_up_parts(site.parts),
            unlabelled=made_up_parts(site.unlabelled),
            held_out=made_up_parts(site.held_out),
        )
        for site in planned.sites(data)
    ]
    try:
        dry_run(
            method,
            sites,
            planned.setting("cpu"),
            network,
            samples=_SAMPLES,
            budget={site.name: _MINI_BATCHES for site in sites},
            rounds=max(1, planned.rounds),
            quorum=engine.quorum,
            on_refusal=engine.on_refusal,
            per_round=planned.drawn,
        )
    except (UserError, TrainingDiverged):
        return  # `check` reports the first by itself; the second is of the samples, not of the method
    except Exception as error:
        kind = "" if isinstance(error, FedshiftError) else f"{type(error).__name__}: "
        text = f"{kind}{error}".partition("\n")[0]
        raise UserError(f"methods: {method.display} fails on made-up samples{line_of(error)}: {text}") from error


def _made_up(domain: Domain, classes: int) -> Domain:
    draws = np.random.default_rng(0)
    shape = (_SAMPLES, *domain.inputs.shape[1:])
    inputs: Inputs
    if not isinstance(domain.inputs, SparseRows) and domain.inputs.dtype == np.int64:
        inputs = draws.integers(0, 2, shape)
    elif isinstance(domain.inputs, SparseRows) or domain.inputs.dtype != np.uint8:
        inputs = draws.normal(size=shape).astype(np.float32)
    else:
        inputs = draws.integers(0, 256, shape, dtype=np.uint8)
    masks = None
    if domain.masks is not None:
        masks = draws.integers(0, 2, (_SAMPLES, *domain.masks.shape[1:]), dtype=np.uint8)
    labels: Labels = np.arange(_SAMPLES) % classes if masks is None else np.zeros(_SAMPLES, dtype=np.int64)
    if domain.labels.dtype.kind == "f":  # 0 and 1 by turns are labels of every task
        labels = np.resize(np.array([0, 1], dtype=np.float32), (*domain.labels.shape[1:], _SAMPLES)).T.copy()
    return Domain(domain.name, inputs, labels, masks=masks, scale=domain.scale)


def try_training(network: Network, options: NetworkOptions, training: Training, input_shape: tuple[int, ...]) -> None:
    """Take one step with made-up samples in [0, 1]. The network does not change.

    ``input_shape``: shape of one sample. UserError if the network cannot train.
    """
    what = f"model '{options.display}'"
    for name, parameter in network.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(
                f"{what} has a weight of type {parameter.dtype} ('{_plain(name)}'), which sites cannot average: keep "
                "its real and imaginary part as one real weight (torch.view_as_real)"
            )
    tried = training.prepare(copy.deepcopy(network)).train()
    samples = made_up(network, SAMPLES, input_shape, torch.Generator().manual_seed(0))
    if len(input_shape) == 3 and network.channels_last:
        samples = samples.contiguous(memory_format=torch.channels_last)
    with told_of(options, "a step of training"), torch.random.fork_rng(devices=[]):
        for part in (tried.features, tried):
            scores: object = part(samples)
            if not isinstance(scores, Tensor) or scores.shape[:1] != (SAMPLES,):
                raise UserError(
                    f"{what} returns {_shape(scores)} while it trains: it must return the scores alone then, too; "
                    "switch off what else it gives, such as auxiliary classifiers (aux_logits: false in torchvision)"
                )
        assert isinstance(scores, Tensor)
        scores.float().square().mean().backward()  # type: ignore[no-untyped-call]
        for name, parameter in tried.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UserError(
                    f"{what} has sparse gradients ('{_plain(name)}'), which no optimiser here takes: make the layer "
                    "with sparse=False"
                )
        training.build_optimizer(tried.parameters(), training.lr).step()


def _shape(scores: object) -> str:
    return f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__


def _plain(name: str) -> str:
    """The user's path of a parameter: without the part of a `Network` that holds it."""
    return name.removeprefix("features.")
