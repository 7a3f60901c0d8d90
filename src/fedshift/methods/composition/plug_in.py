"""Base of the options of ``local``: what a plug-in of local training is called, needs and costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from fedshift.data.domain import ALL_TASKS, Task
from fedshift.errors import UserError
from fedshift.federation.site import PlugIn, Site
from fedshift.models.made_up import made_up, reads_tokens
from fedshift.models.network import Network


class LocalOption(BaseModel, ABC):
    """Base of the options of ``local``.

    Attributes:
        tasks: what it goes with.
        memory_names: what it keeps at a site.
        cost: seconds of a mini-batch that it adds, in those of plain cross-entropy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS
    memory_names: ClassVar[tuple[str, ...]] = ()
    cost: ClassVar[float]

    name: str

    @property
    def of_two_domains(self) -> bool:
        """Whether a mini-batch must be of two domains, half of each."""
        return False

    @abstractmethod
    def at(self, site: Site) -> PlugIn:
        """The plug-in at a site, for one exchange."""

    def check(self, network: Network, input_shape: tuple[int, ...]) -> None:
        """Check that the options fit the network and the samples, before any training.

        Raises UserError: they do not fit.
        """


def check_images(name: str, input_shape: tuple[int, ...], why: str) -> None:
    """Raise UserError, with the reason why, if samples are not images."""
    if len(input_shape) != 3:
        raise UserError(f"{name} needs images: {why}; leave it out")


def check_numbers(name: str, network: Network) -> None:
    """Raise UserError where samples are tokens, with which nobody can calculate."""
    if reads_tokens(network):
        raise UserError(f"{name} calculates with samples, and tokens are no numbers; leave it out")


def check_tiles(name: str, input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Raise UserError if samples cannot be cut into tiles; return warnings."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 2 * GRID:
        raise UserError(f"{name} needs images of at least {2 * GRID}×{2 * GRID} pixels, found {input_shape}")
    return ()


def maps_of(network: Network, stages: tuple[str, ...], input_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of each stage's output for one sample; the network stays in evaluation mode."""
    with torch.no_grad():
        _, result = network.eval().with_stages(made_up(network, 1, input_shape), stages)
    return {name: tuple(output.shape[1:]) for name, output in result.items()}


GRID = 3
"""Tiles in a row and in a column."""


MOST = 71
"""Permutations that `tile_permutations` knows beside the order itself."""
