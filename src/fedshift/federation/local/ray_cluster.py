"""A cluster of Ray that other processes or machines make up: to join it, and to wait for its answers.

Nothing here imports Ray before an experiment asks for it. Ray itself tries nothing again: what a run did is known by
its folder alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedshift import trust
from fedshift.errors import FedshiftError, UserError
from fedshift.extras import import_extra
from fedshift.import_paths import CHILD

LOCAL = "local"
"""The address of a cluster that is this machine alone, for as long as the experiment runs."""
_SECONDS_TO_ANSWER = 10.0
USAGE = "RAY_USAGE_STATS_ENABLED"


@contextmanager
def join_cluster(address: str) -> Iterator[Any]:
    """Join the cluster at an address, ``local`` or that of its head, and leave it at the end. Yields Ray.

    Raises UserError: Ray is not installed, or no cluster answers at the address.
    """
    os.environ[USAGE] = "0"  # before the import; nothing is sent to Ray's makers
    ray = import_extra("ray", extra="ray", what="engine.name: ray")
    before = ray.is_initialized()
    if not before:
        _call_at(address)
        try:
            ray.init(
                address=address,
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"engine.address: no cluster of Ray answers at {address} ({reason})") from error
    try:
        yield ray
    finally:
        if not before:
            ray.shutdown()


def _call_at(address: str) -> None:
    """See that something listens at HOST:PORT; Ray itself would try for minutes. Raises UserError: nothing does."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return  # local, or auto: Ray knows where
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise UserError(f"engine.address: nothing answers at {address} ({error})") from error


def check_room(ray: Any, processes: int, threads: int, cards: float) -> None:
    """Check that so many processes have room in the cluster at the same time.

    Raises UserError: they have not. Ray would wait for ever.
    """
    if processes > (room := room_for(ray, threads, cards)):
        have = ray.cluster_resources()
        raise UserError(
            f"engine: {processes} process(es) of {threads} core(s) and {cards:g} card(s) have no room in the cluster "
            f"of {have.get('CPU', 0):g} cores and {have.get('GPU', 0):g} cards; {room} would have"
        )


def room_for(ray: Any, threads: int, cards: float) -> int:
    """How many processes of so many threads and cards the cluster's nodes have room for together."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = []
    for node in nodes:
        by_cards = node.get("GPU", 0.0) // cards if cards else float("inf")
        rooms.append(min(node.get("CPU", 0.0) // threads, by_cards))
    return int(sum(rooms))


def where() -> dict[str, str]:
    """What a process elsewhere needs to know of this one: the code that it trusts, and that the other is a child."""
    return {**trust.for_children(), CHILD: "1"}


def settle_in(variables: Mapping[str, str], threads: int) -> None:
    """Make a process of Ray one of fedshift's."""
    import torch

    from fedshift.federation.local.allocator import keep_freed_memory

    os.environ.update(variables)
    torch.set_num_threads(threads)
    keep_freed_memory()


def wait_for(ray: Any, answers: Sequence[Any], seconds: float) -> list[Any]:
    """Those of ``answers`` that are there, at least one. Raises FedshiftError: none came in time."""
    there, _ = ray.wait(list(answers), num_returns=1, timeout=seconds)
    if not there:
        raise FedshiftError(
            f"nothing came from the cluster within {seconds:g} seconds (engine.wait): a node may be gone, or too small"
        )
    return list(there)
