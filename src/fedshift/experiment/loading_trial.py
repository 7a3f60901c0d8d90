"""A network that does not come with fedshift, tried before it trains: its file, a prediction, an export."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedshift.data.site_data import SiteData
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.export import export
from fedshift.experiment.plan import PlannedRun, model_metadata
from fedshift.experiment.predict import from_weights, load_model
from fedshift.experiment.runs.run_folder import MODEL, model_file
from fedshift.models import registry as models
from fedshift.models.own.forward_trial import SAMPLES, told_of
from fedshift.weights import Weights

_SMALL = 5_000_000
"""Parameters of a network whose export as ONNX is tried: that of larger ones takes long."""


def try_loading(planned: PlannedRun) -> tuple[str, ...]:
    """Write a run's model with arbitrary weights, load it, predict with it, and export it. Nothing is kept.

    Args:
        planned: a run whose network does not come with fedshift.

    Returns:
        A warning for each format in which the model cannot be exported.

    Raises:
        UserError: the model could not be loaded, or would predict something else.
    """
    options, data, method = planned.experiment.model, planned.data, planned.run.method
    what = f"model '{options.display}'"
    network = models.build(options, data.input_shape, len(data.classes), 0)
    sources = len(planned.plan.roles(planned.run.target)[0])
    evaluated = method.evaluated_network(method.adapt_network(network, sources), sources)
    weights, metadata = Weights(evaluated.state_dict()), model_metadata(planned)
    with tempfile.TemporaryDirectory() as folder, told_of(options, "predicting with it after training"):
        file = Path(folder, MODEL)
        file.write_bytes(model_file(weights, metadata))
        try:
            loaded = load_model(file, method, options.code)
        except UserError as error:
            reason = str(error).replace(str(file), "its file")
            raise UserError(f"{what} trains, but could not be loaded afterwards: {reason}") from error
        here = from_weights(weights, metadata, method, options)
        domain = next(iter(data.domains.values()))
        view = SiteData([(domain, np.arange(min(SAMPLES, len(domain))), 0)], data.preprocessing)
        with torch.no_grad():
            inputs, *_ = next(view.all_batches(SAMPLES))
            expected, gave = here.network(inputs), loaded.network(inputs)
        if not torch.allclose(expected, gave, rtol=0, atol=0, equal_nan=True):
            raise UserError(
                f"{what} trains, but predicts something else once it is loaded: what it computes depends on more than "
                "its parameters and buffers; register the rest with register_buffer"
            )
        warnings = []
        for to in _formats(network):
            try:
                export(loaded, to, Path(folder))
            except FedshiftError as error:
                warnings.append(f"{what} trains and predicts, but fedshift export --to {to} will fail: {error}")
        return tuple(warnings)


def _formats(network: nn.Module) -> tuple[str, ...]:
    """The formats in which an export is quickly tried."""
    installed = all(importlib.util.find_spec(package) for package in ("onnx", "onnxruntime", "onnxscript"))
    small = sum(parameter.numel() for parameter in network.parameters()) <= _SMALL
    return ("torchscript", "onnx") if installed and small else ("torchscript",)
