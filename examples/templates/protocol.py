"""A protocol: sites come one after the other, and each is unseen by a model of those before it.

To add it to fedshift, move the class to a file in ``fedshift/experiment/protocols/`` and name it in ``Protocol`` of
``index.py`` there. Everything else asks the class.
"""

from dataclasses import replace
from itertools import takewhile
from typing import ClassVar, Literal

from pydantic import Field

from fedshift.data.domain import DataSet
from fedshift.errors import UserError
from fedshift.experiment.protocols.base import DeployedProtocol, ProtocolSection, Roles, Split
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut


class EarlierSites(LeaveOneOut):
    """Each site but the first is a target. Its sources are the sites before it, in the order of the data."""

    question: ClassVar[str] = "Does it work at the next site? Each target was tested with a model of those before it."

    kind: Literal["earlier_sites"] = Field("earlier_sites", description="the protocol")  # type: ignore[assignment]

    def targets_of(self, data: DataSet) -> tuple[str, ...]:
        """All sites but the first, or those that the file names."""
        first, targets = next(iter(data.domains)), super().targets_of(data)
        if first in self.named_targets:
            raise UserError(f"protocol.targets: no site comes before '{first}'; leave it out")
        return tuple(target for target in targets if target != first)

    def roles_of(self, data: DataSet, target: str) -> Roles:
        """The sites before the target that have labels, and the target."""
        before = takewhile(lambda name: name != target, data.domains)
        return tuple(name for name in before if not data.domains[name].unlabelled), (target,)

    def split_of(self, data: DataSet, target: str, seed: int) -> Split:
        """As in the base, of the sites that take part."""
        names = {name for side in self.roles_of(data, target) for name in side}
        part = {name: domain for name, domain in data.domains.items() if name in names}
        return super().split_of(replace(data, domains=part), target, seed)

    def for_deployment(self) -> DeployedProtocol:
        """Refused: it is a simulation."""
        return ProtocolSection.for_deployment(self)
