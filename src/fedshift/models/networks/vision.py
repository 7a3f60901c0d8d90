"""Networks for images, built from torchvision: ResNet-18/50/101, AlexNet and MobileNetV2.

torchvision is imported only when a network is built. Its layers keep their names below ``features.backbone``, so its
weights fit. Pre-trained weights expect colour, so ``features`` repeats grey images to three channels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError, nearest
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions, image_shape
from fedshift.models.pretrained import light_torchvision, load_pretrained


class GreyToColour(nn.Module):
    """Repeats the channel of grey images: (n, 1, h, w) → (n, 3, h, w), without a copy."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


class TensorFlowConv2d(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding: as few zeros as needed, the odd one at the bottom and right.

    torchvision pads both sides equally. On images of even size this shifts the input of a strided convolution by one
    pixel.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        # ``pad`` takes (left, right, top, bottom): the width comes first.
        sides: list[int] = []
        for axis in (1, 0):
            size, kernel, stride = inputs.shape[2 + axis], self.kernel_size[axis], self.stride[axis]
            outputs = -(-size // stride)
            zeros = max((outputs - 1) * stride + kernel - size, 0)
            sides += [zeros // 2, zeros - zeros // 2]
        return functional.conv2d(
            functional.pad(inputs, sides), self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )

    @classmethod
    def like(cls, convolution: nn.Conv2d) -> TensorFlowConv2d:
        """The same convolution, sharing its weights, with TensorFlow's padding."""
        kernel, stride = cast(tuple[int, int], convolution.kernel_size), cast(tuple[int, int], convolution.stride)
        same = cls(
            convolution.in_channels,
            convolution.out_channels,
            kernel,
            stride,
            groups=convolution.groups,
            bias=convolution.bias is not None,
        )
        same.weight, same.bias = convolution.weight, convolution.bias
        return same


class StoredBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that always normalises by the statistics it was loaded with and never changes them."""

    def train(self, mode: bool = True) -> StoredBatchNorm2d:
        """Stay in evaluation mode, whatever ``mode``."""
        super().train(False)
        return self

    @classmethod
    def like(cls, norm: nn.BatchNorm2d) -> StoredBatchNorm2d:
        """The same layer, sharing its weights and statistics."""
        same = cls(norm.num_features, norm.eps, norm.momentum)
        same.weight, same.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            same.register_buffer(name, buffer)
        return same.train()


class VisionOptions(NetworkOptions):
    """Base of the torchvision networks' options."""

    pretrained: bool | Path = Field(
        False,
        union_mode="left_to_right",
        description="true, or the name of torchvision's weights (IMAGENET1K_V1); or a path, absolute or below "
        "FEDSHIFT_WEIGHTS: a .safetensors or .npz file with torchvision's names",
    )
    bottleneck: PositiveInt | None = Field(
        None, description="width of a Linear-BatchNorm-ReLU before the classifier (CSAC's ResNet-18: 256)"
    )
    trained_from: str | None = Field(
        None,
        description="first stage that is trained; earlier ones keep their loaded weights; none: train all",
    )
    batch_norm: Literal["batch", "stored"] = Field(
        "batch", description="statistics that BatchNorm uses in training: the mini-batch's, or always the loaded ones"
    )

    def _backbone(self, input_shape: tuple[int, ...], classes: int) -> tuple[int, nn.Module]:
        """The number of channels of the data, and torchvision's network with new weights and ``classes`` outputs."""
        channels, _, _ = image_shape(self.name, input_shape)
        if channels not in (1, 3):
            raise UserError(
                f"model '{self.name}' reads grey or colour images, but the data set has {channels} channels"
            )
        torchvision = light_torchvision()
        return channels, cast(nn.Module, torchvision.models.get_model(self.name, weights=None, num_classes=classes))

    def _network(
        self,
        channels: int,
        backbone: nn.Module,
        head: nn.Linear,
        stages: Mapping[str, str],
        alignment_stages: tuple[str, ...],
    ) -> Network:
        """The network made of these modules.

        ``channels``: channels of the data, 1 or 3. ``head``: that last layer; the classifier unless there is a
        bottleneck. ``stages``: stage name → path of the module in ``backbone``.
        """
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if channels == 1:
            layers["colour"] = GreyToColour()
        layers["backbone"] = backbone
        self._keep(backbone, stages)
        classifier = head
        if self.bottleneck is not None:
            layers["bottleneck"] = nn.Sequential(
                nn.Linear(head.in_features, self.bottleneck), nn.BatchNorm1d(self.bottleneck), nn.ReLU()
            )
            classifier = nn.Linear(self.bottleneck, head.out_features)
        network = Network(
            nn.Sequential(layers),
            classifier,
            embedding_size=classifier.in_features,
            classes=classifier.out_features,
            stages={stage: f"features.backbone.{path}" for stage, path in stages.items()},
            alignment_stages=alignment_stages,
        )
        network.backbone = "features.backbone"
        return network

    def _keep(self, backbone: nn.Module, stages: Mapping[str, str]) -> None:
        """Freeze the layers before ``trained_from`` and the BatchNorm statistics that must not change."""
        untrained: list[str] = []
        if self.trained_from is not None:
            names = list(stages)
            if self.trained_from not in names:
                raise UserError(
                    f"model.trained_from: '{self.name}' has no stage '{self.trained_from}'; "
                    f"{nearest(self.trained_from, names)}"
                )
            # Modules are listed in the order of the forward pass; a stage is the output of its last module.
            before = names[: names.index(self.trained_from)]
            end = stages[before[-1]] if before else ""
            paths = [path for path, _ in backbone.named_modules() if path]
            last = max((number for number, path in enumerate(paths) if f"{path}.".startswith(f"{end}.")), default=-1)
            untrained = paths[: last + 1] if before else []
        for path, module in list(backbone.named_modules()):
            if path in untrained and not any(module.children()):
                module.requires_grad_(False)
            if isinstance(module, nn.BatchNorm2d) and (self.batch_norm == "stored" or path in untrained):
                parent, _, child = path.rpartition(".")
                setattr(backbone.get_submodule(parent), child, StoredBatchNorm2d.like(module))


class _ResNet(VisionOptions):
    """Residual network (He et al., CVPR 2016). Stages: ``stem`` (after pooling) and ``block1`` … ``block4``.

    ResNet-18 at 224 px: 64x56x56, 64x56x56, 128x28x28, 256x14x14, 512x7x7; four times the channels in the blocks of
    ResNet-50 and -101. CSAC aligns blocks 2 to 4 and uses ``bottleneck: 256``. Any image size.
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, backbone = self._backbone(input_shape, classes)
        load_pretrained(backbone, self.pretrained, model=self.name, head="fc")
        head = cast(nn.Linear, backbone.fc)
        backbone.fc = nn.Identity()
        stages = {"stem": "maxpool"} | {f"block{number}": f"layer{number}" for number in range(1, 5)}
        return self._network(channels, backbone, head, stages, ("block2", "block3", "block4"))


class ResNet18(_ResNet):
    __doc__ = _ResNet.__doc__
    name: Literal["resnet18"] = "resnet18"


class ResNet50(_ResNet):
    __doc__ = _ResNet.__doc__
    name: Literal["resnet50"] = "resnet50"


class ResNet101(_ResNet):
    __doc__ = _ResNet.__doc__
    name: Literal["resnet101"] = "resnet101"


class AlexNet(VisionOptions):
    """AlexNet as in torchvision: five convolutions, fc6 and fc7 (4096) as features, and a new last layer.

    Stages: ``conv1`` … ``conv5`` after ReLU, the last also after pooling (at 224 px: 64x55x55, 192x27x27, 384x13x13,
    256x13x13, 256x6x6). Alignment takes the last three. The last layer is drawn by Xavier's rule with gain 0.1, as in
    CSAC (Yuan et al., IEEE TKDE 2023). Images need at least 63 pixels a side.
    """

    name: Literal["alexnet"] = "alexnet"

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        _, height, width = image_shape(self.name, input_shape)
        if min(height, width) < 63:
            raise UserError(
                f"model 'alexnet' needs images of at least 63x63 pixels, but the data set has {height}x{width}; "
                "enlarge them or choose another model"
            )
        channels, backbone = self._backbone(input_shape, classes)
        layers = cast(nn.Sequential, backbone.classifier)
        head = cast(nn.Linear, layers[-1])
        nn.init.xavier_uniform_(head.weight, gain=0.1)
        nn.init.zeros_(head.bias)
        load_pretrained(backbone, self.pretrained, model=self.name, head="classifier.6")
        backbone.classifier = layers[:-1]
        stages = {f"conv{number}": f"features.{layer}" for number, layer in enumerate((1, 4, 7, 9, 12), start=1)}
        return self._network(channels, backbone, head, stages, ("conv3", "conv4", "conv5"))


class MobileNetV2(VisionOptions):
    """MobileNetV2 (Sandler et al., CVPR 2018).

    Stages, at 224 px: ``stem`` 32x112x112, ``block1`` 16x112x112, ``block2`` 24x56x56, ``block3`` 32x28x28, ``block4``
    96x14x14, ``block5`` 320x7x7, ``last`` 1280x7x7. Alignment takes the output of the last block of each of the three
    coarsest sizes.

    Weights trained with TensorFlow expect ``padding: tensorflow`` and inputs in [-1, 1]: use mean 0.5 and std 0.5 per
    channel (``value / 127.5 - 1``) instead of ImageNet's. A file whose BatchNorm was folded into the convolutions has
    only placeholders for running statistics. Train it with ``batch_norm: stored``; otherwise the first mini-batches
    learn the scales again.
    """

    name: Literal["mobilenet_v2"] = "mobilenet_v2"
    padding: Literal["torchvision", "tensorflow"] = Field(
        "torchvision",
        description="padding of stride-2 convolutions: equal on both sides, or as TensorFlow's weights expect",
    )

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, backbone = self._backbone(input_shape, classes)
        if self.padding == "tensorflow":
            for path, module in list(backbone.named_modules()):
                if isinstance(module, nn.Conv2d) and module.stride != (1, 1):
                    parent, _, child = path.rpartition(".")
                    setattr(backbone.get_submodule(parent), child, TensorFlowConv2d.like(module))
        load_pretrained(backbone, self.pretrained, model=self.name, head="classifier.1")
        layers = cast(nn.Sequential, backbone.classifier)
        head = cast(nn.Linear, layers[-1])
        backbone.classifier = layers[:-1]
        ends = {"stem": 0, "block1": 1, "block2": 3, "block3": 6, "block4": 13, "block5": 17, "last": 18}
        stages = {stage: f"features.{layer}" for stage, layer in ends.items()}
        return self._network(channels, backbone, head, stages, ("block3", "block4", "block5"))
