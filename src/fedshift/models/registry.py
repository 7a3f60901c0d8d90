"""The networks by name, and how one is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from fedshift.class_registry import ClassRegistry
from fedshift.data.domain import Task
from fedshift.errors import UserError, in_words, is_out_of_memory, nearest
from fedshift.models.network_options import NetworkOptions

if TYPE_CHECKING:
    from fedshift.models.network import Network

_NETWORKS: ClassRegistry[NetworkOptions] = ClassRegistry(
    "model",
    NetworkOptions,
    {
        "mnist_cnn": "fedshift.models.networks.cnn:MnistCnn",
        "digit_cnn": "fedshift.models.networks.cnn:DigitCnn",
        "mlp": "fedshift.models.networks.mlp:Mlp",
        "linear": "fedshift.models.networks.mlp:LinearHead",
        "resnet18": "fedshift.models.networks.vision:ResNet18",
        "resnet50": "fedshift.models.networks.vision:ResNet50",
        "resnet101": "fedshift.models.networks.vision:ResNet101",
        "alexnet": "fedshift.models.networks.vision:AlexNet",
        "unet": "fedshift.models.networks.unet:UNet",
        "mobilenet_v2": "fedshift.models.networks.vision:MobileNetV2",
        "frozen": "fedshift.models.networks.frozen:Frozen",
        "clip": "fedshift.models.networks.clip:Clip",
        "clip_text": "fedshift.models.networks.clip:ClipText",
    },
)
names = _NETWORKS.names


def only_known(name: str) -> None:
    """Refuse a network that does not come with fedshift. Raises UserError: always."""
    raise UserError(f"model '{name}' does not come with fedshift, and its code was not imported")


def any_code(name: str) -> None:
    """Permit every network: the caller trusts whoever named it."""


def options_class(name: str) -> type[NetworkOptions]:
    """The options of a network. Raises UserError: there is no network of that name; names the nearest one."""
    return _NETWORKS.find(name)


def parse(
    mapping: Mapping[str, object], folder: Path | None = None, permit: Callable[[str], None] = only_known
) -> NetworkOptions:
    """The options that the ``model:`` section of an experiment file describes.

    ``folder``: where a user's own file is looked up first. ``permit``: called with the name of a network that does not
    come with fedshift, also of one inside another, before anything is imported. It raises to refuse. Raises UserError:
    the name or a field is unknown, or a value is out of bounds.
    """
    name = _NETWORKS.name_in(mapping, "model.name")
    is_own = ":" in name
    if is_own:
        permit(name)
        from fedshift.models.own import own_network
        from fedshift.models.own.structure import Parts
    kind = own_network.OwnNetwork if is_own else options_class(name)
    try:
        if is_own:
            return own_network.parse(mapping, folder)
        return kind.model_validate(dict(mapping), context={"folder": folder, "permit": permit})
    except ValidationError as invalid:
        # Report the first fault only: later ones often follow from it.
        fault = invalid.errors()[0]
        path = ".".join(["model", *(str(part) for part in fault["loc"])])
        if fault["type"] == "extra_forbidden":
            field = str(fault["loc"][-1])
            # A user's own network takes any option, so the field is one of its parts.
            known = Parts.model_fields if is_own else kind.model_fields
            raise UserError(f"{path}: model '{name}' has no such field; {nearest(field, known)}") from None
        raise UserError(f"{path}: {in_words(fault)}, got {repr(fault['input'])[:100]}") from None


def check_task(options: NetworkOptions, task: Task, what: str) -> None:
    """Check that a network is for the task of a data set: masks need one of their own.

    ``what``: name of the data set, for the message. Raises UserError: the network is for another task.
    """
    if options.code is not None:  # what a user's own network says shows when it is built
        return
    masks = task == "segmentation"
    if (options.task == "segmentation") != masks:
        fitting = [name for name in names() if (options_class(name).task == "segmentation") == masks]
        raise UserError(
            f"model.name: '{options.display}' is a network for {options.task}, but data set {what} is for {task}: "
            f"choose {' or '.join(fitting)}{', monai:UNet or smp:Unet' if masks else ''}"
        )


def build(options: NetworkOptions, input_shape: tuple[int, ...], classes: int, seed: int) -> Network:
    """The network, with weights drawn from ``seed`` alone.

    The caller's random state is neither read nor changed. Networks that read images come in the channels-last memory
    format, in which convolutions are faster on CPU and GPU. Values and shapes are the same, but call ``contiguous()``
    on their tensors before writing a file format that needs it.

    ``input_shape``: shape of one sample, (channels, height, width) or (d,). ``classes``: number of classes, of
    structures for segmentation, or 1 for a quantity. ``seed``: what the weights are drawn from; the network keeps it as
    ``seed``. Raises UserError: the network cannot read such samples or is too large for this machine, or there is no
    class.
    """
    import torch

    if classes < 1:
        raise UserError(f"model '{options.display}': it needs something to predict, but the data set has no class")
    with torch.random.fork_rng(devices=[]):
        # The CPU generator alone: torch.manual_seed would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        try:
            network = options.build(input_shape, classes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"model '{options.display}': there is not enough memory for its weights") from None
    network.seed = seed
    if len(input_shape) == 3 and network.channels_last:
        network.to(memory_format=torch.channels_last)
    return network
