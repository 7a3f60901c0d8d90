"""Federations of processes on machines of their own, as far as one machine can play that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loopback import options_of, simulate

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from loopback import ADAPT, model, same
from namespaces import COORDINATOR, PORT, SITES, Namespaces, why_not
from network import environment, rounds

pytestmark = pytest.mark.slow


def test_in_network_namespaces_of_their_own(tmp_path: Path) -> None:
    """As on three machines: the same bits, no socket of a site but to the coordinator, one port at the coordinator."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    apart = Namespaces(tmp_path)
    options: dict[str, Any] = options_of({}, name="apart", protocol=ADAPT, methods=["kd3a"])
    with environment(apart):
        try:
            apart.connect()
            apart.start()
            deployment = apart.deploy(options, unseen=False)
            apart.wait(deployment, lambda: rounds(deployment) >= 1)
            held = {name: apart.sockets(name) for name in ("coordinator", *SITES)}
            there = apart.finish(deployment)
        finally:
            apart.stop()
            apart.disconnect()
    door = f"{COORDINATOR}:{PORT}"
    for name in SITES:
        assert {(far, listens) for _, far, listens in held[name]} == {(door, False)}, held[name]
    assert {near for near, _, listens in held["coordinator"] if listens} == {f"0.0.0.0:{PORT}"}
    assert all(listens or door in (near, far) for near, far, listens in held["coordinator"]), held["coordinator"]
    here = simulate(tmp_path, options, SITES, unseen={})
    assert same(model(here, "kd3a", "east"), model(there, "kd3a", "east"))
