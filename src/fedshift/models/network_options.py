"""The base of every network's options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fedshift.data.domain import Task
from fedshift.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedshift.models.network import Network


class NetworkOptions(BaseModel):
    """The fields of ``model:`` in an experiment file, and how the network is built from them.

    A subclass sets ``name`` (a `Literal` with a default), its own fields, and ``build``. Callers build networks with
    `fedshift.models.registry.build`, which adds the seed and the memory format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: ClassVar[Task] = "classification"

    name: str

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        """The network, with weights drawn from torch's generator.

        ``input_shape``: shape of one sample, (channels, height, width) or (d,). ``classes``: number of classes, or of
        structures for segmentation. Raises UserError: the network cannot read such samples.
        """
        raise UserError(f"model '{self.name}' cannot be built")

    @property
    def display(self) -> str:
        """The name in messages and tables; without the path of a user's own file."""
        return self.name

    @property
    def starts_at_random(self) -> bool:
        """Whether it could have pre-trained weights and has none; False for a user's own code."""
        return not getattr(self, "pretrained", False)

    def networks(self) -> Iterator[NetworkOptions]:
        """This network and those inside it."""
        yield self
        for _, value in self:
            if isinstance(value, NetworkOptions):
                yield from value.networks()

    @property
    def code(self) -> Any:
        """Of a network that does not come with fedshift, its name or the object that it was given as; else None."""
        return None

    def record(self) -> dict[str, Any]:
        """The options for results and model files. They hold no path of code; a user's file is named by its checksum.

        Two runs with equal records trained the same network.
        """
        nested = {field: value.record() for field, value in self if isinstance(value, NetworkOptions)}
        return {**self.model_dump(mode="json"), **nested}

    def report(self, input_shape: tuple[int, ...], classes: int) -> tuple[str, ...]:
        """What was found out about the network by itself, a sentence each; nothing for those that fedshift describes.

        Args:
            input_shape: shape of one sample.
            classes: number of classes.
        """
        return ()

    def masks(self, scores: Tensor) -> NDArray[np.bool_]:
        """Predicted masks: where the sigmoid is above one half.

        ``scores``: the network's output, (n, structures, …). Returns masks of that shape.
        """
        return (scores.sigmoid() > 0.5).cpu().numpy()

    def structure(self, input_shape: tuple[int, ...], classes: int) -> dict[str, Any] | None:
        """What was found out about a network that does not come with fedshift, for its model file; None of others."""
        return None

    def take_structure(self, input_shape: tuple[int, ...], classes: int, known: Any) -> None:
        """Build such a network as `structure` said of it, and do not find it out again.

        Raises ValueError: ``known`` is not what `structure` gives.
        """


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of one image. Returns (channels, height, width). Raises UserError: the samples are not images."""
    if len(input_shape) == 3:
        channels, height, width = input_shape
        return channels, height, width
    text = f"vectors of {input_shape[0]} numbers" if len(input_shape) == 1 else f"arrays of shape {input_shape}"
    raise UserError(f"model '{model}' reads images, but the data set has {text}; choose mlp or linear")
