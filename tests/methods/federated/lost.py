"""Sites that give no reply, and what sites remember."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, cast

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.weights import Weights


def lose(where: Federation, *sites: str) -> None:
    """From now on these sites are not reached; the others go on without them."""
    deliver = where.deliver

    def changed(call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        for request in requests:
            if request.site in sites:
                yield Missing(request.site, FedshiftError("lost"))
            else:
                yield from deliver(call, iter([request]))

    where.deliver = changed  # type: ignore[method-assign]
    where.quorum = 1


def site_of(where: Federation, name: str = "large") -> Site:
    return cast(LocalFederation, where)._runners[name].site


def kept(where: Federation, name: str, entry: str) -> Weights:
    """What a site remembers under this name."""
    return site_of(where, name).memory.weights(entry)
