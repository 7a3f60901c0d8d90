"""Pre-trained weights, from torchvision or from a file format that cannot run code (.safetensors, .npz)."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift.digests import check_filled
from fedshift.errors import UserError
from fedshift.extras import COMPILER, compiler_comes_later

_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    SafetensorError,
)
_PICKLED = {".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".tar"}


def light_torchvision() -> Any:
    """torchvision, imported without torch's compiler.

    torchvision imports the compiler for one function that no network here uses (RoI align). With it the import takes
    150 MB and a second more, in every process. Whoever does use that function gets the compiler then.
    """
    utils = f"{COMPILER}.utils"
    if "torchvision" not in sys.modules and compiler_comes_later():
        stand_in = ModuleType(utils)
        stand_in.is_compile_supported = (  # type: ignore[attr-defined]
            lambda device: importlib.import_module(utils).is_compile_supported(device)
        )
        sys.modules[utils] = stand_in
        try:
            importlib.import_module("torchvision")
        except ImportError:  # this torchvision needs more of the compiler; below it is imported with all of it
            pass
        finally:
            del sys.modules[utils]
    return importlib.import_module("torchvision")


def load_pretrained(backbone: nn.Module, source: bool | Path, *, model: str, head: str) -> None:
    """Copy pre-trained weights into a torchvision network.

    ``backbone``: the network; changed in place. ``source``: False: nothing is copied. True: torchvision's default
    weights. The name of one of torchvision's weights (``IMAGENET1K_V1``): those. Anything else: a file. ``head``: path
    of its last layer, which keeps its new weights if the source has another number of classes. Raises UserError: the
    weights cannot be found, downloaded or read, do not fit, or are not finite.
    """
    if source is False:
        return
    torchvision = light_torchvision()

    known = torchvision.models.get_model_weights(model).__members__
    if source is True or str(source) in known:
        weights = "DEFAULT" if source is True else str(source)
        result, origin = _download(model, weights), f"torchvision's {model} {weights}"
    else:
        path = find_file(source)
        result, origin = read_weights(path), f"weights file {path}"
    copy_weights(backbone, result, origin=origin, model=model, head=head)


def must_be_downloaded(source: bool | Path, model: str) -> bool:
    """Whether `load_pretrained` would have to download the weights; they are on this machine if it did so before."""
    torchvision = light_torchvision()

    known = torchvision.models.get_model_weights(model).__members__
    if source is not True and str(source) not in known:
        return False
    url = known["DEFAULT" if source is True else str(source)].url
    return not (Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]).is_file()


def find_file(path: Path, field: str = "model.pretrained") -> Path:
    """Find a weights file: an absolute path, below FEDSHIFT_WEIGHTS, or below the working directory, in this order.

    ``path``: the path as written in the experiment file. Raises UserError: there is no such file; the message lists the
    places that were searched.
    """
    path = path.expanduser()
    folder = os.environ.get("FEDSHIFT_WEIGHTS")
    places = [Path(folder) / path, path] if folder and not path.is_absolute() else [path]
    for file in places:
        if file.is_file():
            return file
    looked = " and ".join(str(file.absolute()) for file in places)
    unset = not folder and not path.is_absolute()
    advice = "; relative paths are also looked up in FEDSHIFT_WEIGHTS, which is not set" if unset else ""
    raise UserError(f"{field}: no weights file at {looked}{advice}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .npz file by name, floats as float32.

    Raises UserError: the file has another format or cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix in _PICKLED:
        target = path.with_suffix(".safetensors").name
        raise UserError(
            f"weights file {path} is a pickle, which could run code and is never opened; convert it once where you "
            f'trust it: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, v in '
            f"torch.load('{path.name}', map_location='cpu', weights_only=True).items()}}, '{target}')\""
        )
    if suffix not in (".safetensors", ".npz"):
        raise UserError(f"weights file {path}: only .safetensors and .npz are read: convert it")
    try:
        if suffix == ".safetensors":
            check_filled(path, "restore it")  # one of ours may be damaged
            tensors = load_file(path)
        else:
            # Opened here: np.load leaves a damaged archive open when it gives up.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except _UNREADABLE as error:
        raise UserError(f"weights file {path} cannot be read, it may be truncated: {one_line(error)}") from error
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _download(model: str, weights: str) -> dict[str, Tensor]:
    torchvision = light_torchvision()

    choice = torchvision.models.get_model_weights(model)[weights]
    try:
        # torchvision publishes pickles: check_hash compares the checksum, weights_only accepts only tensors.
        with contextlib.redirect_stderr(io.StringIO()):  # torch writes "Downloading: …" there, whatever is asked
            state: dict[str, Tensor] = choice.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:
        raise UserError(
            f"model.pretrained: torchvision's weights of '{model}' cannot be downloaded ({one_line(error)}); "
            "give the path of a .safetensors or .npz file instead"
        ) from error
    return state


def copy_weights(backbone: nn.Module, weights: Mapping[str, Tensor], *, origin: str, model: str, head: str) -> None:
    """Copy weights into a network.

    ``backbone``: the network; changed in place. ``head``: path of its last layer, which keeps its new weights if
    ``weights`` has another number of classes. Raises UserError: the weights do not fit, or are not finite.
    """
    needed = dict(backbone.state_dict())
    given = dict(weights)
    for name, module in backbone.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            _unfold(name, module, given)
            # Old files lack this counter. Nothing depends on its value.
            given.setdefault(f"{name}.num_batches_tracked", torch.tensor(0))
    last = given.get(f"{head}.weight")
    if last is None or last.shape[:1] != needed[f"{head}.weight"].shape[:1]:
        for kind in ("weight", "bias"):
            given.pop(f"{head}.{kind}", None)
            needed.pop(f"{head}.{kind}")
    if faults := list(_misfits(needed, given)):
        raise UserError(f"{origin} does not fit model '{model}': {'; '.join(faults)}")
    for name in needed:
        if not bool(torch.isfinite(given[name]).all()):
            raise UserError(f"{origin}: {name} holds NaN or infinite values")
    # strict=False only because the last layer may be absent; everything else was compared above.
    backbone.load_state_dict({name: given[name] for name in needed}, strict=False)


def load_whole(module: nn.Module, path: Path, model: str) -> None:
    """Copy all weights of a file into a network, which has the same names.

    Raises UserError: the file cannot be read, or the weights do not fit or are not finite.
    """
    needed = module.state_dict()
    # Old files of transformers have these counters, which are no weights.
    weights = {name: tensor for name, tensor in read_weights(path).items() if not name.endswith(".position_ids")}
    if faults := list(_misfits(needed, weights)):
        raise UserError(f"weights file {path} does not fit model '{model}': {'; '.join(faults)}")
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"weights file {path}: {name} holds NaN or infinite values")
    module.load_state_dict(weights)


def _misfits(needed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Iterator[str]:
    """In what names and shapes the weights that are given differ from those that a network needs."""
    if missing := {name: tensor for name, tensor in needed.items() if name not in given}:
        yield f"missing {_listing(missing)}"
    if surplus := {name: tensor for name, tensor in given.items() if name not in needed}:
        yield f"not known to the model {_listing(surplus)}"
    if reshaped := [name for name in needed if name in given and given[name].shape != needed[name].shape]:
        pairs = [f"{name} is {tuple(given[name].shape)}, model has {tuple(needed[name].shape)}" for name in reshaped]
        yield f"of another shape: {_few(pairs)}"


def _unfold(name: str, norm: nn.BatchNorm2d, given: dict[str, Tensor]) -> None:
    """Complete a BatchNorm that was folded into its convolution. Only its bias is left, so it only adds the bias."""
    bias = given.get(f"{name}.bias")
    rest = [f"{name}.{kind}" for kind in ("weight", "running_mean", "running_var")]
    if bias is None or any(key in given for key in rest):
        return
    weight, mean, variance = rest
    given[weight] = torch.ones_like(bias)
    given[mean] = torch.zeros_like(bias)
    # BatchNorm divides by the root of variance + ε, which is thus 1.
    given[variance] = torch.full_like(bias, 1.0 - norm.eps)


def _listing(tensors: Mapping[str, Tensor]) -> str:
    return _few([f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()])


def _few(entries: list[str], count: int = 3) -> str:
    shown = ", ".join(islice(entries, count))
    return f"{shown} and {len(entries) - count} more" if len(entries) > count else shown


def one_line(error: Exception) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
