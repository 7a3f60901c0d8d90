"""What every network's options share: a frozen description that can build the network for a data set's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from fedshift.data.domain import Task
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.models.network import Network


class NetworkOptions(BaseModel):
    """Base of the networks' options: the fields of ``model:`` in an experiment file.

    A subclass sets ``name`` as a `Literal` with a default, its own fields, and ``build``. Build through
    `fedshift.models.registry.build`, which adds the seed and the memory format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: ClassVar[Task] = "classification"

    name: str

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        """The network for samples of ``input_shape``, (channels, height, width) or (d,), with new weights.

        Weights come from torch's generator. Raises UserError if the network cannot read such samples.
        """
        raise UserError(f"model '{self.name}' cannot be built")


def image_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """``input_shape`` as (channels, height, width). Raises UserError if the samples are not images."""
    if len(input_shape) == 3:
        channels, height, width = input_shape
        return channels, height, width
    found = f"vectors of {input_shape[0]} numbers" if len(input_shape) == 1 else f"arrays of shape {input_shape}"
    raise UserError(f"model '{model}' reads images, data set gives {found}; choose mlp or linear")
