"""Small convolutional networks for digits."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from torch import nn

from fedshift.errors import UserError
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions, image_shape


class MnistCnn(NetworkOptions):
    """Two 5x5 convolutions and two fully connected layers: CSAC's network for Rotated MNIST.

    2x2 max-pooling and ReLU follow each convolution. Images may have any number of channels. Stages: ``conv1`` and
    ``conv2`` after pooling and ReLU (16x12x12 and 32x4x4 at 28 px and default widths), and ``hidden``. Source: Yuan et
    al., IEEE TKDE 2023; the paper gives no widths.
    """

    name: Literal["mnist_cnn"] = "mnist_cnn"
    channels: tuple[PositiveInt, PositiveInt] = Field((16, 32), description="output channels of the two convolutions")
    hidden: PositiveInt = Field(128, description="width of the first fully connected layer")
    padding: NonNegativeInt | None = Field(
        None, description="zeros around each convolution's input; unset: 0, but 2 for images below 16 pixels"
    )

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, height, width = image_shape(self.name, input_shape)
        padding = self.padding
        if padding is None:
            # Without padding, at least 16 pixels are needed to leave one position after both poolings.
            padding = 0 if min(height, width) >= 16 else 2
        rows, columns = height, width
        for _ in self.channels:
            rows, columns = (rows + 2 * padding - 4) // 2, (columns + 2 * padding - 4) // 2
        if min(rows, columns) < 1:
            raise UserError(
                f"model 'mnist_cnn': images of {height}x{width} leave nothing after two convolutions with padding "
                f"{padding}; raise model.padding or the image size"
            )
        features = nn.Sequential(
            OrderedDict(
                conv1=self._stage(channels, self.channels[0], padding),
                conv2=self._stage(self.channels[0], self.channels[1], padding),
                flatten=nn.Flatten(),
                hidden=nn.Sequential(nn.Linear(self.channels[1] * rows * columns, self.hidden), nn.ReLU()),
            )
        )
        return Network(
            features,
            nn.Linear(self.hidden, classes),
            embedding_size=self.hidden,
            classes=classes,
            stages={stage: f"features.{stage}" for stage in ("conv1", "conv2", "hidden")},
            alignment_stages=("conv1", "conv2"),
        )

    @staticmethod
    def _stage(inputs: int, outputs: int, padding: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=padding), nn.MaxPool2d(2), nn.ReLU())


class DigitCnn(NetworkOptions):
    """Three 5x5 convolutions (64, 64, 128), each with BatchNorm and ReLU: KD3A's network for Digit-5.

    3x3 max-pooling with stride 2 follows the first two. The paper describes one fully connected layer after them. The
    released code has two hidden layers in between, of 3072 (with dropout) and 2048 units, each with BatchNorm and ReLU.
    The default is the code's variant, which produced the published numbers. Use fewer ``channels`` on machines without
    a GPU.

    The network is made for 32x32 colour images (8192 numbers after the convolutions); other sizes work too. Stages:
    ``conv1``, ``conv2``, ``conv3`` (64x16x16, 64x8x8, 128x8x8 at 32 px) and, in the code's variant, ``hidden1`` and
    ``hidden2``. Source: Feng et al., ICML 2021.
    """

    name: Literal["digit_cnn"] = "digit_cnn"
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (64, 64, 128), description="channels of the three convolutions"
    )
    variant: Literal["code", "paper"] = Field("code", description="two hidden layers (code) or none (paper)")
    dropout: float = Field(0.5, ge=0.0, lt=1.0, description="dropout after the first hidden layer (variant code)")

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, height, width = image_shape(self.name, input_shape)
        # Each pooling halves the map, rounding up.
        first, second, third = self.channels
        flat = third * -(-height // 4) * -(-width // 4)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=self._convolution(channels, first, pool=True),
            conv2=self._convolution(first, second, pool=True),
            conv3=self._convolution(second, third, pool=False),
            flatten=nn.Flatten(),
        )
        stages = ["conv1", "conv2", "conv3"]
        embedding_size = flat
        if self.variant == "code":
            layers["hidden1"] = nn.Sequential(nn.Linear(flat, 3072), nn.BatchNorm1d(3072), nn.ReLU())
            layers["dropout"] = nn.Dropout(self.dropout)
            layers["hidden2"] = nn.Sequential(nn.Linear(3072, 2048), nn.BatchNorm1d(2048), nn.ReLU())
            stages += ["hidden1", "hidden2"]
            embedding_size = 2048
        return Network(
            nn.Sequential(layers),
            nn.Linear(embedding_size, classes),
            embedding_size=embedding_size,
            classes=classes,
            stages={stage: f"features.{stage}" for stage in stages},
            alignment_stages=("conv1", "conv2", "conv3"),
        )

    @staticmethod
    def _convolution(inputs: int, outputs: int, *, pool: bool) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU()]
        if pool:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        return nn.Sequential(*layers)
