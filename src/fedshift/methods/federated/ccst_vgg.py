"""Encoder and decoder of arbitrary style transfer: VGG-19 up to relu4_1, and its mirror image.

Source: Huang and Belongie, ICCV 2017; used by CCST (Chen et al., WACV 2023).

Weights are read from files whose names are positions in a sequence of layers, as in the published files. Encoder: ``0``
(a 1×1 convolution that normalises colours), ``2``, ``5``, ``9``, … ``28``. Decoder: ``1``, ``5``, … ``27``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.models.pretrained import find_file, read_weights

CHANNELS = 512  # of relu4_1
_ENCODER = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512)
_DECODER = (256, "up", 256, 256, 256, 128, "up", 128, 64, "up", 64, 3)


def encoder(file: Path, field: str) -> nn.Sequential:
    """The encoder: maps images (n, 3, h, w) in [0, 1] to (n, 512, ⌈h/8⌉, ⌈w/8⌉).

    Args:
        file: file of weights.
        field: path of the option that names the file, for messages.

    Raises:
        UserError: the file is missing or does not fit.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 3, 1)]
    width = 3
    for part in _ENCODER:
        if isinstance(part, str):
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
            continue
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(width, part, 3), nn.ReLU()]
        width = part
    return _loaded(nn.Sequential(*layers), file, field)


def decoder(file: Path, field: str) -> nn.Sequential:
    """The decoder: maps the encoder's output to images (n, 3, h, w) of about [0, 1].

    Args:
        file: as in `encoder`.
        field: as in `encoder`.

    Raises:
        UserError: as in `encoder`.
    """
    layers: list[nn.Module] = []
    width = CHANNELS
    for part in _DECODER:
        if isinstance(part, str):
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
            continue
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(width, part, 3), nn.ReLU()]
        width = part
    return _loaded(nn.Sequential(*layers[:-1]), file, field)


def _loaded(layers: nn.Sequential, file: Path, field: str) -> nn.Sequential:
    """``layers`` with the weights of ``file``, frozen. Layers of the file that come later are ignored."""
    found = read_weights(find_file(file, field))
    wanted: dict[str, Tensor] = layers.state_dict()
    for name, tensor in wanted.items():
        if name not in found or found[name].shape != tensor.shape:
            has = tuple(found[name].shape) if name in found else "nothing"
            raise UserError(f"{field}: {file} has {has} under '{name}', expected {tuple(tensor.shape)}")
    with torch.no_grad():
        layers.load_state_dict({name: found[name] for name in wanted})
    return layers.eval().requires_grad_(False)
