"""A user's own method tried on made-up samples, so that a mistake in its file shows before training."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedshift.data.domain import Domain, Inputs, Labels, Rows, SparseRows
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.costs import dry_run
from fedshift.experiment.plan import PlannedRun
from fedshift.models.network import Network

_SAMPLES = 8
"""Made-up samples of each domain."""
_MINI_BATCHES = 4
"""Mini-batches that each site may train on."""


def try_method(planned: PlannedRun, network: Network) -> None:
    """Run the start and two rounds of a method on made-up samples, with a few mini-batches at each site.

    Args:
        planned: a run of the method.
        network: like that of the run's sites. It is not changed.

    Raises:
        UserError: the method fails. The message names the line of its file.
    """
    method, engine, data = planned.run.method, planned.experiment.engine, planned.data
    made = {name: _made_up(domain, len(data.classes)) for name, domain in data.domains.items()}

    def own(parts: Sequence[tuple[Domain, Rows, int]]) -> list[tuple[Domain, Rows, int]]:
        return [(made[domain.name], np.arange(_SAMPLES, dtype=np.int64), number) for domain, _, number in parts]

    sites = [
        replace(site, parts=own(site.parts), unlabelled=own(site.unlabelled), held_out=own(site.held_out))
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
        said = f"{kind}{error}".partition("\n")[0]
        raise UserError(f"methods: {method.display} fails on made-up samples{_place(error)}: {said}") from error


def _place(error: Exception) -> str:
    """File and line of the user's code at which an error was raised."""
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and "site-packages" not in frame.filename:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _made_up(domain: Domain, classes: int) -> Domain:
    draws = np.random.default_rng(0)
    shape = (_SAMPLES, *domain.inputs.shape[1:])
    inputs: Inputs
    if isinstance(domain.inputs, SparseRows) or domain.inputs.dtype != np.uint8:
        inputs = draws.normal(size=shape).astype(np.float32)
    else:
        inputs = draws.integers(0, 256, shape, dtype=np.uint8)
    masks = None
    if domain.masks is not None:
        masks = draws.integers(0, 2, (_SAMPLES, *domain.masks.shape[1:]), dtype=np.uint8)
    labels: Labels = np.arange(_SAMPLES) % classes if masks is None else np.zeros(_SAMPLES, dtype=np.int64)
    if domain.labels.dtype.kind == "f":  # 0 and 1 by turns are labels of every task
        labels = np.resize(np.array([0, 1], dtype=np.float32), (*domain.labels.shape[1:], _SAMPLES)).T.copy()
    return Domain(domain.name, inputs, labels, masks=masks)
