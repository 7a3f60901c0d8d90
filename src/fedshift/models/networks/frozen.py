"""A frozen backbone and a small trained head: features are computed once, only the head is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, SerializeAsAny, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional

from fedshift.data.domain import Preprocessing, Task
from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.networks.mlp import Mlp

_SCALES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


class Frozen(NetworkOptions):
    """A pre-trained network without its last layer, and a head that is trained on its features.

    The backbone never changes and is never sent. An experiment replaces its images by the backbone's features, computed
    once and cached (`fedshift features` does it ahead of time). Methods train the head, and the stages are the head's.
    """

    name: Literal["frozen"] = "frozen"
    backbone: SerializeAsAny[NetworkOptions] = Field(description="a network with pre-trained weights")
    head: SerializeAsAny[NetworkOptions] = Field(
        default_factory=lambda: Mlp(hidden=(512, 128)), description="the network that is trained on the features"
    )
    size: PositiveInt | None = Field(None, description="height and width that images are scaled to; none: not scaled")
    scale: Literal["imagenet", "half", "clip"] = Field(
        "imagenet",
        description="what the weights expect: ImageNet's mean and deviation, values in [-1, 1], or CLIP's mean and "
        "deviation",
    )

    @field_validator("backbone", "head", mode="before")
    @classmethod
    def _parse_backbone(cls, value: object, about: ValidationInfo) -> object:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return value
        try:
            return registry.parse(value, **(about.context or {}))
        except UserError as error:
            raise ValueError(str(error).removeprefix("model.")) from error

    @field_validator("backbone")
    @classmethod
    def _check_pretrained(cls, backbone: NetworkOptions) -> NetworkOptions:
        if ":" in backbone.name:  # a model file could not name it: it must not decide which code runs
            raise ValueError("a frozen backbone must be a network that comes with fedshift, such as resnet18")
        if not getattr(backbone, "pretrained", False):
            raise ValueError("a frozen backbone needs pre-trained weights: give its field pretrained")
        return backbone

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        if len(input_shape) != 1:
            raise UserError("model 'frozen' trains on features: run it through an experiment, which computes them")
        return self.head.build(input_shape, classes)

    @property
    def code(self) -> Any:
        return self.head.code

    def report(self, input_shape: tuple[int, ...], classes: int) -> tuple[str, ...]:
        return self.head.report(input_shape, classes)

    def structure(self, input_shape: tuple[int, ...], classes: int) -> dict[str, Any] | None:
        return self.head.structure(input_shape, classes)

    def take_structure(self, input_shape: tuple[int, ...], classes: int, known: Any) -> None:
        self.head.take_structure(input_shape, classes, known)

    def build_extractor(self, images: Preprocessing, what: str, task: Task = "classification") -> Extractor:
        """The backbone behind its transform.

        Raises UserError: the data are not images, or the backbone cannot read them or is for another task.
        """
        registry.check_task(self, task, what)
        if images.kind != "image" or images.shape is None:
            shape = "×".join(map(str, images.shape or ()))
            raise UserError(
                f"model.backbone: {self.backbone.name} reads images, but {what} gives {images.kind} of {shape} "
                "numbers; for data that are features already, use a head such as mlp as the model"
            )
        channels, height, width = images.shape
        shape_read = (channels, self.size or height, self.size or width)
        network = registry.build(self.backbone, shape_read, 2, 0)
        return Extractor(network.features, self)


class Extractor(nn.Module):
    """Maps stored images (n, c, h, w) uint8 to features (n, d). It is always in evaluation mode.

    ``backbone``: a network without its classifier; its parameters are frozen. ``options``: which network it is, and the
    size and scale of its images.
    """

    def __init__(self, backbone: nn.Module, options: Frozen) -> None:
        super().__init__()
        self.options = options
        self.backbone = backbone.requires_grad_(False)
        self._size = options.size
        mean, std = _SCALES[options.scale]
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.eval()

    @property
    def name(self) -> str:
        """The name of the backbone."""
        return self.options.backbone.name

    @property
    def transform(self) -> dict[str, Any]:
        """How stored images are prepared for the backbone, as plain data."""
        mean, std = _SCALES[self.options.scale]
        return {"size": self.options.size, "mean": mean, "std": std}

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the backbone's weights and options, without the path of the weights' file."""
        built_as = self.options.backbone.model_dump(mode="json", exclude={"pretrained"})
        digest = hashlib.sha256(json.dumps(built_as, sort_keys=True).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:32]

    def train(self, mode: bool = True) -> Extractor:
        """Stay in evaluation mode, whatever ``mode``: BatchNorm uses the statistics that came with the weights."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Features (n, d) of images (n, c, h, w) uint8 on the extractor's device."""
        values = images.float().div_(255)
        if self._size is not None and values.shape[2:] != (self._size, self._size):
            values = functional.interpolate(values, (self._size, self._size), mode="bilinear", antialias=True)
        channels = values.shape[1]
        mean, std = (self.get_buffer(name)[:, :channels] for name in ("mean", "std"))
        values = ((values - mean) / std).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.backbone(values).flatten(1)
        return features
