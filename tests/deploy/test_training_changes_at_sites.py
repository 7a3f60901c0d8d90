"""``training`` of a method in a deployment: its runs are those of the simulation, and sites agree to all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loopback import deploy, model, options_of, same, simulate

from fedshift.errors import UserError

METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "fedprox", "training": {"lr": 0.3, "batch_size": 5, "rounds": 4}},
]


def experiment() -> dict[str, Any]:
    return options_of(METHODS[0]) | {"methods": METHODS}


@pytest.mark.parametrize("rule", ["any", "first"])
def test_each_method_trains_as_in_the_simulation(rule: str, tmp_path: Path) -> None:
    deployed, transport = deploy(tmp_path, experiment(), training=rule)
    simulated = simulate(tmp_path, experiment())
    for name in ("fedavg", "fedprox"):
        assert same(model(deployed, name, "west"), model(simulated, name, "west"))
    if rule == "any":
        return
    # Agreed to as the first: all that the experiment announced, though its first method asks for less.
    (agreed,) = transport.programs["north"].terms.in_force().training
    assert (agreed.lr, agreed.batch_size, agreed.rounds) == (0.3, 5, 4)


def test_before_a_run_a_site_refuses_the_method_that_goes_too_far(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"refuses to train so: lr 0\.3, not at most 0\.2; batch_size 5"):
        deploy(tmp_path, experiment(), training={"lr": 0.2, "batch_size": 8})


def test_what_is_agreed_to_is_what_was_announced_last(tmp_path: Path) -> None:
    """An experiment whose methods train alike announces nothing beyond its training section."""
    alike = experiment() | {"methods": [METHODS[0]]}
    _, transport = deploy(tmp_path, alike, training="first")
    (agreed,) = transport.programs["north"].terms.in_force().training
    assert (agreed.lr, agreed.batch_size, agreed.rounds) == (0.1, 8, 3)
    with pytest.raises(UserError, match="has not agreed to these training options"):
        deploy(tmp_path / "again", experiment() | {"name": "more"}, transport=transport)
