"""A site that leaves a project: what stays of the project's file, who is refused, and how it comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from fedshift.deploy.flare import roles
from fedshift.deploy.flare.certificates import revoked_sites
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.flare.provision import Provisioned
from fedshift.errors import UserError

HEAD = "# Hearts of the north.\nname: hearts   # as in the contract\ncontact: team@example.org\nserver: localhost\n"
IN_BRACKETS = "sites: [north, south, east]   # in the order of the contract\nport: 9001\n"
LISTED = "sites:\n# who takes part\n- north  # Oslo\n- 'south'\n- east # Umeå\n"


def made_of(folder: Path, text: str) -> tuple[Path, Provisioned]:
    file = folder / "project.yaml"
    file.write_bytes(text.encode())
    return file, roles.provision(roles.load_project(file), folder / "kits", lambda new: None)


@pytest.mark.case(
    "project files", "a site is removed from a list in brackets, a list of lines, one with CRLF, one in parts"
)
@pytest.mark.parametrize(
    ("sites", "site", "left"),
    [
        (IN_BRACKETS, "north", "sites: [south, east]   # in the order of the contract\nport: 9001\n"),
        (IN_BRACKETS, "south", "sites: [north, east]   # in the order of the contract\nport: 9001\n"),
        (IN_BRACKETS, "east", "sites: [north, south]   # in the order of the contract\nport: 9001\n"),
        (LISTED, "north", "sites:\n# who takes part\n- 'south'\n- east # Umeå\n"),
        (LISTED, "south", "sites:\n# who takes part\n- north  # Oslo\n- east # Umeå\n"),
        (LISTED, "east", "sites:\n# who takes part\n- north  # Oslo\n- 'south'\n"),
        (LISTED.rstrip("\n"), "east", "sites:\n# who takes part\n- north  # Oslo\n- 'south'\n"),
        (LISTED.replace("\n", "\r\n"), "south", LISTED.replace("- 'south'\n", "").replace("\n", "\r\n")),
        ("sites: [north,\n  south,  # Bergen\n  east]\n", "north", "sites: [south,  # Bergen\n  east]\n"),
    ],
)
def test_all_else_of_a_projects_file_stays(sites: str, site: str, left: str, tmp_path: Path) -> None:
    file, _ = made_of(tmp_path, HEAD + sites)
    made = roles.remove(file, tmp_path / "kits", site)
    assert file.read_bytes().decode() == HEAD + left
    assert (
        roles.load_project(file).sites == tuple(made.sites) == tuple(s for s in ("north", "south", "east") if s != site)
    )


@pytest.mark.case("revoked sites", "a site is removed, and comes back with a new kit")
def test_a_site_that_left_is_refused_until_it_gets_a_new_kit(tmp_path: Path) -> None:
    file, before = made_of(tmp_path, HEAD + IN_BRACKETS)
    old = (before.sites["south"] / "flare" / "startup" / "client.crt").read_bytes()
    roles.remove(file, tmp_path / "kits", "south")
    kit = load_kit(before.coordinator)
    assert kit.project.sites == ("north", "east")
    assert revoked_sites(kit) == {"south"}, "the name is remembered, and the other sites are accepted"
    assert (before.sites["south"] / "SITE.yaml").exists()
    _, again = made_of(tmp_path, HEAD + IN_BRACKETS)
    assert again.new == ("south",)
    assert revoked_sites(load_kit(before.coordinator)) == set()
    assert (before.sites["south"] / "flare" / "startup" / "client.crt").read_bytes() != old


@pytest.mark.case("revoked sites", "a site taken out of the project's file by hand, provisioned, and put back")
def test_a_site_that_was_taken_out_by_hand_is_refused_too(tmp_path: Path) -> None:
    _, made = made_of(tmp_path, HEAD + IN_BRACKETS)
    made_of(tmp_path, HEAD + "sites: [north, east]\n")
    assert revoked_sites(load_kit(made.coordinator)) == {"south"}
    made_of(tmp_path, HEAD + IN_BRACKETS)
    assert revoked_sites(load_kit(made.coordinator)) == {"south"}, "its old kit may be in other hands by now"
    roles.set_revoked(made.coordinator, "south", False)
    assert revoked_sites(load_kit(made.coordinator)) == set()


@pytest.mark.parametrize(
    ("sites", "out", "site", "message"),
    [
        (IN_BRACKETS, "kits", "suoth", "did you mean 'south'"),
        ("sites: [south]\n", "kits", "south", "only site"),
        (IN_BRACKETS, "elsewhere", "south", "--out"),
        ("x: &all [north, south]\nsites: *all\n", "kits", "south", "x"),
    ],
)
def test_what_cannot_be_removed_changes_nothing(sites: str, out: str, site: str, message: str, tmp_path: Path) -> None:
    file, made = made_of(tmp_path, HEAD + IN_BRACKETS)
    file.write_text(HEAD + sites)
    before = {path: path.read_bytes() for path in (file, made.coordinator / "kit.json")}
    with pytest.raises(UserError, match=message) as raised:
        roles.remove(file, tmp_path / out, site)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in before} == before
    assert not json.loads((made.coordinator / "certificates.json").read_text())["south"]["revoked"]


def test_a_removal_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    file, made = made_of(tmp_path, HEAD + IN_BRACKETS)
    text = file.read_bytes()
    roles.remove(file, tmp_path / "kits", "south")
    after = file.read_bytes()
    file.write_bytes(text)  # it is written last
    roles.remove(file, tmp_path / "kits", "south")
    assert file.read_bytes() == after
    assert revoked_sites(load_kit(made.coordinator)) == {"south"}
