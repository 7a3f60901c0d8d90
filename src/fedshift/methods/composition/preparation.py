"""Base of the options of ``prepare``: what sites do with their samples before a method trains on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from fedshift.federation.federation import Federation
from fedshift.federation.replies import About, Bounds
from fedshift.federation.site import Site
from fedshift.models.network import Network


class Preparation(BaseModel, ABC):
    """Base of the options of ``prepare``. As a method it has calls, functions ``(self, site, **content) -> Reply``.

    Attributes:
        memory_names: what it keeps at a site.
        cost: seconds of a mini-batch that it adds, in those of plain cross-entropy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_names: ClassVar[tuple[str, ...]] = ()
    cost: ClassVar[float]

    name: str

    @abstractmethod
    def start(self, federation: Federation) -> None:
        """What the server asks of the sites before the method starts."""

    @abstractmethod
    def inside(self, site: Site) -> AbstractContextManager[None]:
        """What surrounds every call of the method at a site."""

    def bounds(self, call: str, about: About) -> Bounds:
        """As `Method.bounds`, for its own calls."""
        return {}

    def check(self, network: Network, input_shape: tuple[int, ...], sources: int) -> None:
        """Check that the options fit the network, samples of this shape, and so many sources, before any training.

        Raises UserError: they do not fit.
        """
