"""A trained model in formats that other programs run, from stored samples to probabilities.

What is exported reads float32 samples as they are stored: images (n, c, h, w) of 0 to 255, features (n, d), or the
encoded columns of a table. It gives probabilities (n, classes), for segmentation (n, structures, h, w), and for
regression values (n, 1) in the label's unit.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load
from torch import Tensor, nn

from fedshift.data.transforms import normalise, to_network
from fedshift.errors import FedshiftError, UserError, nearest
from fedshift.experiment.predict import TrainedModel, from_weights
from fedshift.experiment.runs.run_folder import model_file
from fedshift.extras import import_extra
from fedshift.files import write_bytes
from fedshift.models.made_up import made_up
from fedshift.models.own.forward_trial import one_line
from fedshift.weights import Weights

Floats = npt.NDArray[np.float32]
Samples = npt.NDArray[np.float32] | npt.NDArray[np.int64]
"""Samples in the form in which they are stored, bytes as floats."""
_TOLERANCE = 1e-4
"""Largest accepted difference of a probability. Runtimes add numbers in another order."""


@dataclass(frozen=True)
class Exported:
    """A file that was written."""

    file: Path  # the file
    # the largest difference between its probabilities and the model's, on the samples that were tried
    difference: float
    pushed: str | None = None  # the address of the commit on Hugging Face's hub; None: it was not pushed


class _Whole(nn.Module):
    """A trained model with its preprocessing."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.network, self.extractor = trained.network, trained.extractor
        self.preprocessing, self.segments, self.objective = trained.preprocessing, trained.segments, trained.objective

    def forward(self, samples: Tensor) -> Tensor:
        if self.extractor is not None:
            values = self.extractor(samples.clone()).half().float()  # float16, as in the cache of features
        else:
            values = samples / 255 if self.preprocessing.kind == "image" else samples
        scores: Tensor = self.network(normalise(values, self.preprocessing))
        return scores.sigmoid() if self.segments else self.objective.scores(scores)


def export(trained: TrainedModel, to: str, folder: Path) -> Exported:
    """Write a trained model, after a check that its outputs agree with fedshift's own.

    The file answers sample by sample with the trained network. It does not adapt to a new site.

    Args:
        to: ``onnx``, ``torchscript`` or ``safetensors``.

    Raises:
        UserError: there is no such format, a package is missing, the network cannot be written in this format, or the
            file cannot be written.
        FedshiftError: the outputs differ. Nothing is written.
    """
    if to not in _WRITERS:
        raise UserError(f"--to: there is no format '{to}'; {nearest(to, _WRITERS)}")
    if trained.preprocessing.standardise is not None:
        raise UserError(
            "this model reads each site's samples in their own scale (data.standardise: per_site), which a file that "
            "answers sample by sample cannot: use fedshift predict, or train with standardise: true"
        )
    name, write = _WRITERS[to]
    whole = _Whole(trained).eval().requires_grad_(False)
    try:
        data, run = write(trained, whole)
    except FedshiftError:
        raise
    except Exception as error:  # of the network's own code, or of torch's
        raise UserError(f"this network cannot be written as {to}: {one_line(error)}") from error
    difference = 0.0
    for number in (1, 5):  # the number of samples is not fixed
        samples = _samples(trained, number)
        difference = max(difference, float(np.abs(run(samples) - _fedshift_scores(trained, samples)).max()))
    if not difference <= _TOLERANCE:
        raise FedshiftError(
            f"the exported model's probabilities differ by {difference:.2g} from the run's: {to} does not suit this "
            "network, so nothing was written"
        )
    write_bytes(folder / name, data)
    return Exported(folder / name, difference)


def json_metadata(trained: TrainedModel) -> dict[str, str]:
    """What an exported file says about itself: classes, preprocessing and where the model comes from, as JSON."""
    return {name: json.dumps(value) for name, value in trained.metadata.items()}


def _fedshift_scores(trained: TrainedModel, samples: Samples) -> Floats:
    """The probabilities that fedshift itself computes."""
    stored = samples.astype(np.uint8) if trained.stored.kind == "image" else samples
    if not trained.segments:
        return trained.scores(stored, adapted=False)
    with torch.no_grad():
        scores = trained.network(to_network(torch.from_numpy(stored), trained.preprocessing, "cpu"))
    return np.asarray(scores.sigmoid())


def _samples(trained: TrainedModel, number: int) -> Samples:
    """Made-up samples in the form in which they are stored."""
    rng = np.random.default_rng(number)
    shape = trained.stored_shape
    if trained.stored.kind == "tokens":
        return made_up(trained.network, number, shape, torch.Generator().manual_seed(number)).long().numpy()
    if trained.stored.kind == "image":
        return rng.integers(0, 256, (number, *shape)).astype(np.float32)
    values = rng.normal(size=(number, *shape))
    mean, std = trained.preprocessing.mean, trained.preprocessing.std
    return (values if mean is None or std is None else values * std + mean).astype(np.float32)


Written = tuple[bytes, Callable[[Samples], Floats]]
"""The content of a file, and what computes probabilities from that content."""


def _onnx(trained: TrainedModel, whole: nn.Module) -> Written:
    onnx = import_extra("onnx", extra="export", what="onnx")
    runtime = import_extra("onnxruntime", extra="export", what="onnx")
    import_extra("onnxscript", extra="export", what="onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            whole,
            (torch.from_numpy(_samples(trained, 3)),),
            input_names=["samples"],
            output_names=["probabilities" if trained.objective.has_probabilities else "values"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, json_metadata(trained))
    data = model.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda samples: np.asarray(session.run(None, {"samples": samples})[0])


def _torchscript(trained: TrainedModel, whole: nn.Module) -> Written:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        script: Any = torch.jit
        traced = script.trace(whole, torch.from_numpy(_samples(trained, 3)), check_trace=False)
        script.save(traced, buffer, _extra_files=json_metadata(trained))
        loaded = script.load(io.BytesIO(buffer.getvalue()))
    return buffer.getvalue(), lambda samples: _probabilities(loaded, samples)


def _safetensors(trained: TrainedModel, whole: nn.Module) -> Written:
    data = model_file(trained.network.state_dict(), trained.metadata)
    again = _Whole(from_weights(Weights(load(data)), trained.metadata, trained.method, trained.options)).eval()
    return data, lambda samples: _probabilities(again, samples)


def _probabilities(model: Any, samples: Samples) -> Floats:
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(samples)))


_WRITERS: Mapping[str, tuple[str, Callable[[TrainedModel, nn.Module], Written]]] = {
    "onnx": ("model.onnx", _onnx),
    "torchscript": ("model.pt", _torchscript),
    "safetensors": ("model.safetensors", _safetensors),
}


_WHAT = "--push"


def checked_repository(repository: str) -> str:
    """The name of a repository, ``OWNER/NAME``. UserError if it is none, or huggingface_hub is not installed."""
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repository)
        if repository.count("/") != 1:
            raise ValueError
    except ValueError:  # huggingface_hub's own error is one, too
        raise UserError(f"{_WHAT}: '{repository}' is no repository: write OWNER/NAME; --out is a folder") from None
    return repository


def push(repository: str, folder: Path, files: Sequence[str]) -> str:
    """Upload files of a folder in one commit. A repository that is not there yet is made, for its owner alone.

    The token is the one that huggingface_hub finds (``hf auth login``, ``HF_TOKEN``). Nothing is asked.

    Args:
        repository: ``OWNER/NAME``.
        files: their names; whatever else lies in the folder stays.

    Returns:
        The address of the commit.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    hub = _hub()
    api = hub.HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="A model of fedshift and its card",
        )
    except (OSError, ValueError, hub.errors.HTTPError) as error:  # no token, no network, or the hub refuses
        why = _without_token(str(error).partition("\n")[0], hub)
        raise UserError(
            f"{_WHAT}: {repository} was not changed ({why}): log in with hf auth login, or set HF_TOKEN to a token "
            f"that may write there; the files are in {folder}"
        ) from None
    return str(done.commit_url)


def _without_token(text: str, hub: Any) -> str:
    token = hub.get_token()
    return text.replace(token, "…") if token else text


def _hub() -> Any:
    return import_extra("huggingface_hub", extra="export", what=_WHAT)
