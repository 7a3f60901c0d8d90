"""Kits of an earlier fedshift name classes that are elsewhere now: whoever has one is told to ask for a new one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedshift.deployment.flare import roles
from fedshift.deployment.flare.kits import COORDINATOR_CLASS, SITE_CLASS, load_kit
from fedshift.errors import UserError
from fedshift.import_paths import find

pytest.importorskip("nvflare")

PROJECT = {"name": "old", "contact": "team@example.org", "server": "localhost", "port": 8002, "sites": ["north"]}


def kit(folder: Path, role: str, allowed: str) -> Path:
    """What `load_kit` reads of a kit, with one class that FLARE may run."""
    (folder / "flare" / "local").mkdir(parents=True)
    name = "coordinator" if role == "coordinator" else "north"
    (folder / "kit.json").write_text(json.dumps({"role": role, "name": name, "project": PROJECT}))
    (folder / "flare" / "local" / "resources.json").write_text(json.dumps({"class_allow_list": [allowed]}))
    return folder


@pytest.mark.parametrize(
    ("role", "before"),
    [
        ("coordinator", "fedshift.federation.flare" + ".FlareCoordinator"),
        ("site", "fedshift.federation.flare" + ".FlareSite"),
    ],
)
def test_a_kit_of_before_is_refused_in_one_line(tmp_path: Path, role: str, before: str) -> None:
    with pytest.raises(UserError, match=r"anew.*--renew") as caught:
        roles.load_kit(kit(tmp_path, role, before), role)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("role", "now"), [("coordinator", COORDINATOR_CLASS), ("site", SITE_CLASS)])
def test_a_kit_of_now_is_taken(tmp_path: Path, role: str, now: str) -> None:
    assert load_kit(kit(tmp_path, role, now), role).role == role
    assert isinstance(find(now[::-1].replace(".", ":", 1)[::-1]), type)
