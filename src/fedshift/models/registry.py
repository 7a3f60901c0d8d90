"""The networks by name. A network's module is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from fedshift.data.domain import Task
from fedshift.errors import UserError, in_words, nearest
from fedshift.models.options import NetworkOptions

if TYPE_CHECKING:
    from fedshift.models.network import Network

_NETWORKS = {
    "mnist_cnn": "fedshift.models.cnn:MnistCnn",
    "digit_cnn": "fedshift.models.cnn:DigitCnn",
    "mlp": "fedshift.models.mlp:Mlp",
    "linear": "fedshift.models.mlp:LinearHead",
    "resnet18": "fedshift.models.vision:ResNet18",
    "resnet50": "fedshift.models.vision:ResNet50",
    "resnet101": "fedshift.models.vision:ResNet101",
    "alexnet": "fedshift.models.vision:AlexNet",
    "unet": "fedshift.models.unet:UNet",
    "mobilenet_v2": "fedshift.models.vision:MobileNetV2",
    "frozen": "fedshift.models.frozen:Frozen",
}


def names() -> tuple[str, ...]:
    """The names of all networks; imports none of them."""
    return tuple(_NETWORKS)


def options_class(name: str) -> type[NetworkOptions]:
    """The options of the network ``name``. Raises UserError, with the nearest name, if there is none."""
    if name not in _NETWORKS:
        raise UserError(f"unknown model '{name}'; {nearest(name, _NETWORKS)}")
    module, _, attribute = _NETWORKS[name].partition(":")
    return cast(type[NetworkOptions], getattr(importlib.import_module(module), attribute))


def parse(mapping: Mapping[str, object]) -> NetworkOptions:
    """Options from ``{"name": …, …}``. Raises UserError for an unknown name or field and for a value out of bounds."""
    name = mapping.get("name")
    if not isinstance(name, str):
        raise UserError(f"model.name: give the name of a network; {nearest('', _NETWORKS)}")
    kind = options_class(name)
    try:
        return kind.model_validate(dict(mapping))
    except ValidationError as invalid:
        # Only the first fault is told: one line, and a fault further on is often a consequence.
        fault = invalid.errors()[0]
        path = ".".join(["model", *(str(part) for part in fault["loc"])])
        if fault["type"] == "extra_forbidden":
            field = str(fault["loc"][-1])
            raise UserError(f"{path}: model '{name}' has no such field; {nearest(field, kind.model_fields)}") from None
        raise UserError(f"{path}: {in_words(fault)}, got {fault['input']!r}") from None


def check_task(options: NetworkOptions, task: Task, what: str) -> None:
    """Raises UserError unless the network is one for the ``task`` of the data set called ``what``."""
    if options.task != task:
        fitting = [name for name in names() if options_class(name).task == task]
        raise UserError(
            f"model.name: '{options.name}' is a network of {options.task}, data set {what} is one of {task}: choose "
            f"{' or '.join(fitting)}"
        )


def build(options: NetworkOptions, input_shape: tuple[int, ...], classes: int, seed: int) -> Network:
    """The network with weights drawn from ``seed`` alone; the caller's random state is neither read nor changed.

    Networks that read images come in the channels-last memory format, in which convolutions are faster on CPU and GPU.
    Values and shapes are unaffected, but call ``contiguous()`` before writing their tensors to a file that asks for it.
    Raises UserError if the network cannot read samples of ``input_shape`` or a classifier has fewer than two classes.
    """
    import torch

    if classes < 2 and options.task == "classification":
        raise UserError(f"model '{options.name}': a classifier needs at least 2 classes, data set gives {classes}")
    with torch.random.fork_rng(devices=[]):
        # The CPU generator alone: torch.manual_seed would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        network = options.build(input_shape, classes)
    network.seed = seed
    if len(input_shape) == 3:
        network.to(memory_format=torch.channels_last)
    return network
