"""Networks of MONAI and of segmentation-models-pytorch by name; nothing is downloaded, and they start at random."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedshift.errors import UserError, nearest
from fedshift.extras import import_extra

Maker = Callable[..., nn.Module]


def monai_network(name: str) -> Maker:
    """What makes a network of ``monai.networks.nets`` from input shape, classes and the network's own options.

    Axes, channels and sizes come from the data, by the names that MONAI's networks have for them.

    Raises UserError: MONAI is not installed, or has no such network.
    """
    nets = import_extra("monai.networks.nets", extra="volumes", what=f"model 'monai:{name}'")
    kind = _network_of(nets, name, "monai")
    taken = inspect.signature(kind).parameters

    def make(shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
        known = known_sizes(shape, classes)
        _refuse(options, {*known, "pretrained", "progress"}, f"monai:{name}")
        fixed = {option: value for option, value in known.items() if option in taken}
        made: nn.Module = kind(**fixed, **options)
        return made

    return make


def known_sizes(shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """What the data say, by the names that MONAI's networks have for it."""
    return {
        **dict.fromkeys(("in_channels", "n_input_channels"), shape[0]),
        **dict.fromkeys(("out_channels", "num_classes", "classes"), classes),
        "spatial_dims": len(shape) - 1,
        "img_size": shape[1:],
        "in_shape": shape,
    }


def smp_network(name: str) -> Maker:
    """What makes a network of segmentation-models-pytorch from input shape, structures and the network's own options.

    Raises UserError: the package is not installed, or has no such network.
    """
    smp = import_extra("segmentation_models_pytorch", extra="volumes", what=f"model 'smp:{name}'")
    kind = _network_of(smp, name, "smp")

    def make(shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
        if len(shape) != 3:
            raise UserError(
                f"model 'smp:{name}' reads images, and the samples have the shape {shape}: choose monai:UNet"
            )
        fixed = {"encoder_weights": None, "in_channels": shape[0], "classes": classes}
        _refuse(options, {*fixed, "activation", "aux_params"}, f"smp:{name}")
        made: nn.Module = kind(**fixed, **options)
        return made

    return make


def _network_of(library: Any, name: str, short: str) -> type[nn.Module]:
    kinds = {
        key: value for key, value in vars(library).items() if isinstance(value, type) and issubclass(value, nn.Module)
    }
    if name not in kinds:
        raise UserError(f"model: {short} has no network '{name}'; {nearest(name, kinds)}")
    return kinds[name]


def _refuse(options: dict[str, Any], reserved: set[str], model: str) -> None:
    for option in options:
        if option in reserved:
            raise UserError(
                f"model.{option}: this option of '{model}' cannot be set: the data say it, or weights would load"
            )
