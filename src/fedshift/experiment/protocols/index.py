"""The protocols by name. A new one is a file beside this one, and its class in `Protocol`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.base import ProtocolSection
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.experiment.protocols.participants import Participants
from fedshift.experiment.protocols.source_target import SourceTarget

Protocol = LeaveOneOut | AdaptToOne | SourceTarget | Participants
"""What the section ``protocol`` can be; the first is the default."""
PROTOCOLS: Mapping[str, type[Protocol]] = {kind.model_fields["kind"].default: kind for kind in get_args(Protocol)}
"""The protocols by `kind`."""
EXTENT = tuple(dict.fromkeys(name for kind in PROTOCOLS.values() for name in kind.extent))
"""Fields of any protocol that say which runs an experiment has."""


def protocol_of(options: object) -> type[ProtocolSection] | None:
    """The protocol of a record or a file by its section ``protocol``; None if there is none that is known.

    Example:
        >>> protocol_of({"kind": "source_target"}).both_sides
        True
        >>> protocol_of({}) is None
        True
    """
    kind = options.get("kind") if isinstance(options, Mapping) else None
    return PROTOCOLS.get(kind) if isinstance(kind, str) else None
