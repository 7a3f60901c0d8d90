"""The network of a MONAI bundle in a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedshift.data.monai_bundle import Bundle, parser_of, trusted_bundle
from fedshift.errors import UserError
from fedshift.models.own.segmentation_libraries import known_sizes

PREFIX = "bundle"
_NETWORK = "network_def"
_WEIGHTS = Path("models") / "model.pt"


def bundle_network(name: str, attribute: str, folder: Path | None) -> tuple[Bundle, Callable[..., nn.Module]]:
    """A bundle that a person trusts, and what makes its network from input shape, classes and options.

    ``folder``: where a relative one is looked up first. The working directory is next. Raises UserError: it is no
    bundle, or nobody trusts it.
    """
    path = Path(attribute).expanduser()
    beside = (folder or Path()) / path
    bundle = trusted_bundle(f"model '{name}'", beside if beside.is_dir() else path)

    def make(shape: tuple[int, ...], classes: int, *, pretrained: bool = False, **options: Any) -> nn.Module:
        with parser_of(bundle, ("train", "inference"), (_NETWORK,)) as (parser, entry):
            if isinstance(parser[entry], dict):
                sizes = known_sizes(shape, classes)
                for option, value in {**options, **{key: sizes[key] for key in sizes if key in parser[entry]}}.items():
                    parser[f"{entry}::{option}"] = value
            elif options:
                raise UserError(f"{bundle.what}: its network_def is an expression, which takes no options")
            made: nn.Module = parser.get_parsed_content(entry, instantiate=True)
        if pretrained:
            _load(made, bundle)
        return made

    return bundle, make


def _load(module: nn.Module, bundle: Bundle) -> None:
    """Copy the bundle's weights, but for tensors whose shape says other channels or structures.

    Raises UserError: there are none, they cannot be read as tensors alone, or they are of another network.
    """
    path = bundle.folder / _WEIGHTS
    try:
        result = torch.load(path, map_location="cpu", weights_only=True)
        given = result.get("model", result)
        state = module.state_dict()
        fitting = {
            name: tensor for name, tensor in given.items() if name in state and state[name].shape == tensor.shape
        }
    except Exception as error:  # of many kinds: of files, of archives, of what is no tensor
        raise UserError(f"{bundle.what}: {path} cannot be read as weights ({type(error).__name__})") from error
    if given.keys() != state.keys() or 2 * len(fitting) < len(state):
        raise UserError(f"{bundle.what}: {path} holds the weights of another network")
    module.load_state_dict(fitting, strict=False)
