"""Which sites an experiment is of: revoked, removed, dropped ones, and one that has begun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback import SITES, Loopback, deploy, events, options_of, site_file, write_data

from fedshift.deploy.coordinator import check_members, coordinate
from fedshift.deploy.json_files import CARDS
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.site_cards import cards_of
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import parse

EVERY = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}
GONE = frozenset({"north", "up"})
"""North is revoked; up has left the project."""


@pytest.mark.case("revoked sites", "targets and dropped sites that are revoked, removed, misspelt")
@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ({"targets": ["north"]}, "targets: .*'north' was revoked.*fedshift project accept north"),
        ({"targets": ["up"]}, "targets: .*'up' was removed"),
        ({"targets": ["eats"]}, "targets: .*'eats'.*'east'"),
        ({"targets": ["sites"], "drop": ["eats"]}, "drop: .*'eats'.*'east'"),
        ({"targets": ["sites"], "drop": ["east", "south"]}, "no site is left"),
        ({"targets": ["sites"], "drop": ["north"]}, None),
        ({"targets": ["sites"], "drop": ["up"]}, None),
        ({"targets": ["east"]}, None),
        ({"targets": "all"}, None),
    ],
)
def test_names_are_checked_before_anything_starts(protocol: dict[str, Any], message: str | None) -> None:
    whole = options_of({"name": "fedavg"}, protocol={"seeds": [0], **protocol})
    experiment = parse({**whole, "data": {"name": "sites"}, "engine": {"name": "flare"}})
    if message is None:
        check_members(experiment, [*SITES], GONE)
        return
    with pytest.raises(UserError, match=message) as raised:
        check_members(experiment, [*SITES], GONE)
    assert "\n" not in str(raised.value)


def sites_asked(transport: Loopback) -> set[str]:
    return {site for site, _ in transport.asked}


@pytest.mark.case("revoked sites", "a project that grows and shrinks while an experiment is interrupted")
def test_an_experiment_goes_on_with_the_sites_that_it_began_with(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "up": 22})
    transport = Loopback({name: site_file(tmp_path, name, files[name], smallest_group=1) for name in files})
    options = options_of({"name": "fedavg"}, protocol=EVERY)

    def interrupt(site: str, header: Mapping[str, Any], answer: Any) -> Any:
        return Lost("it is down") if header.get("call") and header["envelope"]["round"] == 2 else answer

    transport.change = interrupt
    with pytest.raises(FedshiftError):
        deploy(tmp_path, options, unseen={}, transport=transport, engine={"quorum": 2})
    assert cards_of(tmp_path / "deployment").keys() == SITES.keys()

    def south_is_gone(site: str, header: Mapping[str, Any], answer: Any) -> Any:
        return Lost("its kit was revoked") if site == "south" else answer

    transport.change, transport.asked = south_is_gone, []
    coordinate(tmp_path / "deployment", transport, ["north", "east", "up"])
    assert sites_asked(transport) == SITES.keys(), "up has joined since, and south is revoked"
    warned = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    assert any("'up'" in text for text in warned)
    assert any("'south'" in text for text in warned)


@pytest.mark.case("revoked sites", "a first try that failed before training does not bind the next to its sites")
def test_an_experiment_that_never_began_is_of_the_sites_of_now(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol=EVERY)
    with pytest.raises(UserError, match=r"engine\.quorum"):
        deploy(tmp_path, options, unseen={}, engine={"quorum": 4})
    assert not (tmp_path / "deployment" / CARDS).exists()
    folder, transport = deploy(tmp_path, options, sites={"north": 41, "east": 26}, unseen={})
    assert sites_asked(transport) == {"north", "east"}
    assert (folder / "fedavg" / "sites" / "seed-0" / "result.json").exists()


@pytest.mark.case("agreements", "three of four sites refuse, for different reasons, one of them for two")
def test_what_all_sites_lack_is_one_answer(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "up": 22})
    rules: dict[str, dict[str, Any]] = {
        "north": {"methods": ["csac"], "splits": 1},
        "south": {"send": ["numbers"]},
        "east": {"models": [{"name": "linear"}]},
    }
    places = {name: site_file(tmp_path, name, file, **rules.get(name, {})) for name, file in files.items()}
    transport = Loopback(places)
    options = options_of({"name": "fedavg"}, protocol={**EVERY, "seeds": [0, 1]})
    with pytest.raises(UserError) as raised:
        deploy(tmp_path, options, sites={**SITES, "up": 22}, unseen={}, transport=transport)
    text = str(raised.value)
    assert "\n" not in text
    assert "3 of 4 sites" in text
    parts = dict(zip(("north", "south", "east"), re.split(r"\([123]\) ", text)[1:], strict=True))
    for site, rule in (("north", "methods"), ("north", "splits"), ("south", "send"), ("east", "models")):
        assert parts[site].startswith(f"site '{site}'")
        assert f"policy.{rule}" in parts[site]
        assert "SITE.yaml" in parts[site] or "fedshift site agree" in parts[site]
    assert "site 'up'" not in text
    assert sites_asked(transport) == {*SITES, "up"}
    refused = {event["site"] for event in events(tmp_path) if event["what"] == "hello"}
    assert refused == SITES.keys(), "deploy logs has one line for each"
    for path in places.values():
        whole = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**whole, "policy": {"smallest_group": 1}}))
    assert deploy(tmp_path, options, sites={**SITES, "up": 22}, unseen={}, transport=Loopback(places))
