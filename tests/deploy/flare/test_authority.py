"""The authority's key and the files of kits: who can read them, and what a lost kit or a lost key is worth."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from outcomes import one_line

from fedshift.deploy.flare import roles
from fedshift.deploy.flare.certificates import revoked_sites
from fedshift.deploy.flare.kit_checks import check_certificates, check_settings
from fedshift.deploy.flare.kits import COORDINATOR_CLASS, SITE_CLASS, Project, load_kit
from fedshift.deploy.flare.provision import Provisioned
from fedshift.errors import UserError
from fedshift.import_paths import find
from fedshift.json_objects import read_object
from tried import slow_after

SECRET = "a long passphrase"


@pytest.fixture
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def project(folder: Path, *sites: str, **changes: object) -> Project:
    options = {"name": "p", "contact": "team@example.org", "server": "localhost", "sites": list(sites), **changes}
    (folder / "project.yaml").write_text(yaml.safe_dump(options))
    return roles.load_project(folder / "project.yaml")


def made_of(folder: Path, *sites: str, secret: str | None = SECRET) -> Provisioned:
    return roles.provision(project(folder, *sites), folder, lambda new: secret)


def private_keys(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
            yield path


def refuse(new: bool) -> str | None:
    raise AssertionError("the key is not needed")


@pytest.mark.threat("other_user_kits")
def test_nobody_else_reads_a_kit_or_the_authority_whatever_the_umask(careless: None, tmp_path: Path) -> None:
    made = made_of(tmp_path, "north")
    roles.reissue(project(tmp_path, "north"), tmp_path, "north", lambda new: SECRET)
    roles.set_revoked(made.coordinator, "north", True)
    paths = [made.folder, *made.folder.rglob("*")]
    assert len(list(private_keys(made.folder))) == 4  # authority, coordinator, its administrator, north
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


@pytest.mark.threat("copied_authority")
def test_the_authority_keeps_no_key_but_its_own_and_that_one_encrypted(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north")
    (key,) = private_keys(made.folder / "authority")
    serialization.load_pem_private_key(key.read_bytes(), SECRET.encode())
    with pytest.raises(TypeError, match="encrypted"):
        serialization.load_pem_private_key(key.read_bytes(), None)


@pytest.mark.slow
@pytest.mark.threat("copied_authority")
def test_without_the_passphrase_no_kit_is_made(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north")
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    with one_line("passphrase"):
        made_of(tmp_path, "north", "south", secret="another")
    with pytest.raises(UserError, match="passphrase"):
        roles.reissue(project(tmp_path, "north"), tmp_path, "north", lambda new: "another")
    assert {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()} == before
    assert made_of(tmp_path, "north", "south").new == ("south",)
    assert roles.provision(project(tmp_path, "north", "south"), tmp_path, refuse).new == ()


@pytest.mark.slow
def test_a_new_kit_of_a_site_is_of_the_same_authority_and_leaves_the_site_its_file(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north", "south")
    site = made.sites["north"]
    (site / "SITE.yaml").write_text("site: north  # filled in\n")
    keys = {path.parts[-4]: path.read_bytes() for path in private_keys(made.folder / "sites")}
    roles.reissue(project(tmp_path, "north", "south"), tmp_path, "north", lambda new: SECRET)
    check_certificates(load_kit(site))
    assert (site / "SITE.yaml").read_text() == "site: north  # filled in\n"
    again = {path.parts[-4]: path.read_bytes() for path in private_keys(made.folder / "sites")}
    assert [name for name in keys if keys[name] != again[name]] == ["north"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "scheme", "site", "message"),
    [
        (("north",), "tcp", "sotuh", "no site 'sotuh'"),
        (("north",), "grpc", "north", "--renew"),
        (("north", "east"), "tcp", "east", "fedshift project provision"),
    ],
)
def test_what_cannot_be_reissued(sites: tuple[str, ...], scheme: str, site: str, message: str, tmp_path: Path) -> None:
    made_of(tmp_path, "north")
    with pytest.raises(UserError, match=message):
        roles.reissue(project(tmp_path, *sites, scheme=scheme), tmp_path, site, lambda new: SECRET)


@pytest.mark.slow
def test_what_is_revoked_stays_so_when_a_site_is_added(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north", "south")
    roles.set_revoked(made.coordinator, "north", True)
    made_of(tmp_path, "north", "south", "east")
    assert revoked_sites(load_kit(made.coordinator)) == {"north"}
    with pytest.raises(UserError, match="no site 'nroth'; did you mean 'north'"):
        roles.set_revoked(made.coordinator, "nroth", True)
    made_of(tmp_path, "south", "east")  # north has left the project
    listed = read_object(made.coordinator / "certificates.json")
    assert {name for name, entry in listed.items() if entry["revoked"]} == {"north"}
    assert listed.keys() == {"north", "south", "east", "team@example.org"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for another user")
def test_the_services_user_can_read_what_root_revoked(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north")
    os.chown(made.coordinator, 12345, 12345)
    roles.set_revoked(made.coordinator, "north", True)
    list_file = (made.coordinator / "certificates.json").stat()
    assert (list_file.st_uid, stat.S_IMODE(list_file.st_mode)) == (12345, 0o600)


def as_of_before(made: Provisioned) -> None:
    """Give an authority the form that an earlier fedshift left: FLARE's state, with all keys in clear."""
    authority = made.folder / "authority"
    key = serialization.load_pem_private_key((authority / "rootCA.key").read_bytes(), SECRET.encode())
    pem, pkcs8, clear = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    whole: dict[str, object] = {"root_cert": (authority / "rootCA.pem").read_text()}
    whole["root_pri_key"] = key.private_bytes(pem, pkcs8, clear).decode()
    startups = {site: kit / "flare" / "startup" for site, kit in made.sites.items()}
    for name, startup in {**startups, "team@example.org": made.coordinator / "admin" / "startup"}.items():
        files = {"cert": startup / "client.crt", "pri_key": startup / "client.key"}
        whole[name] = {part: path.read_text() for part, path in files.items()}
    shutil.rmtree(authority)
    (authority / "p" / "state").mkdir(parents=True)
    (authority / "p" / "state" / "cert.json").write_text(json.dumps(whole))
    (made.coordinator / "certificates.json").unlink()


@pytest.mark.slow
def test_an_authority_of_before_is_encrypted_and_its_kits_stay_valid(tmp_path: Path) -> None:
    made = made_of(tmp_path, "north")
    accepted = (made.coordinator / "certificates.json").read_text()
    as_of_before(made)
    with pytest.raises(UserError, match="fedshift project provision"):
        check_settings(load_kit(made.coordinator))
    asked: list[bool] = []

    def ask(new: bool) -> str:
        asked.append(new)
        return SECRET

    assert (roles.provision(project(tmp_path, "north"), tmp_path, ask).new, asked) == ((), [True])
    assert (made.coordinator / "certificates.json").read_text() == accepted
    check_settings(load_kit(made.coordinator))
    (key,) = private_keys(made.folder / "authority")
    assert b"ENCRYPTED" in key.read_bytes()


FILTERS = {
    "a filter that looks for arrays": {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {}},
    "by its name": {"name": "PercentilePrivacy", "args": {"percentile": 10}},
    "of somebody's own": {"path": "hospital.filters.Mine"},
}


@pytest.mark.threat("useless_filters")
@pytest.mark.parametrize("which", FILTERS)
@pytest.mark.parametrize("chain", ["task_result_filters", "task_data_filters"])
@pytest.mark.parametrize("role", ["site", "coordinator"])
def test_filters_that_do_nothing_are_refused(which: str, chain: str, role: str, project_kits: Provisioned) -> None:
    kit = load_kit(project_kits.coordinator if role == "coordinator" else project_kits.sites["north"])
    file = kit.flare / "local" / "privacy.json"
    scopes = [{"name": "public", chain: [FILTERS[which]]}]
    file.write_text(json.dumps({"scopes": scopes, "default_scope": "public"}))
    try:
        for begin in (check_settings, lambda kit: roles.start(kit, wait=0)):
            with one_line(r"(SVTPrivacy|PercentilePrivacy|Mine).*policy\.send"):
                begin(kit)
    finally:
        file.unlink()


def test_a_scope_without_filters_is_no_mistake(project_kits: Provisioned) -> None:
    file = project_kits.sites["north"] / "flare" / "local" / "privacy.json"
    file.write_text(json.dumps({"scopes": [{"name": "public"}], "default_scope": "public"}))
    check_settings(load_kit(project_kits.sites["north"]))
    file.write_text("{broken")
    with pytest.raises(UserError, match=r"policy\.send"):
        check_settings(load_kit(project_kits.sites["north"]))
    file.unlink()


@pytest.mark.threat("useless_filters")
def test_what_flares_filter_does_to_a_message_of_ours() -> None:
    """Nothing, and it says that all is well: why such a filter is refused."""
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

    from fedshift.deploy.flare.engine import message_from, shareable_of
    from fedshift.deploy.remote.wire import Message

    message = Message("{}", bytes(range(100)), "0" * 64)
    assert message_from(PercentilePrivacy().process(shareable_of(message), FLContext())) == message


@pytest.fixture(scope="module")
def project_kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return made_of(tmp_path_factory.mktemp("one"), "north")


OLD = {"name": "old", "contact": "team@example.org", "server": "localhost", "port": 8002, "sites": ["north"]}


def kit_of(folder: Path, role: str, allowed: str) -> Path:
    """What `load_kit` reads of a kit, with one class that FLARE may run."""
    (folder / "flare" / "local").mkdir(parents=True)
    name = "coordinator" if role == "coordinator" else "north"
    (folder / "kit.json").write_text(json.dumps({"role": role, "name": name, "project": OLD}))
    (folder / "flare" / "local" / "resources.json").write_text(json.dumps({"class_allow_list": [allowed]}))
    return folder


@pytest.mark.parametrize(("role", "now"), [("coordinator", COORDINATOR_CLASS), ("site", SITE_CLASS)])
def test_a_kit_of_now_is_taken(tmp_path: Path, role: str, now: str) -> None:
    assert load_kit(kit_of(tmp_path, role, now), role).role == role
    assert isinstance(find(now[::-1].replace(".", ":", 1)[::-1]), type)


HEAD = "# Hearts of the north.\nname: hearts   # as in the contract\ncontact: team@example.org\nserver: localhost\n"
IN_BRACKETS = "sites: [north, south, east]   # in the order of the contract\nport: 9001\n"
LISTED = "sites:\n# who takes part\n- north  # Oslo\n- 'south'\n- east # Umeå\n"


def provision_text(folder: Path, text: str) -> tuple[Path, Provisioned]:
    file = folder / "project.yaml"
    file.write_bytes(text.encode())
    return file, roles.provision(roles.load_project(file), folder / "kits", lambda new: None)


@pytest.mark.slow
@pytest.mark.case(
    "project files", "a site is removed from a list in brackets, a list of lines, one with CRLF, one in parts"
)
@pytest.mark.parametrize(
    ("sites", "site", "left"),
    slow_after(
        4,
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
    ),
)
def test_all_else_of_a_projects_file_stays(sites: str, site: str, left: str, tmp_path: Path) -> None:
    file, _ = provision_text(tmp_path, HEAD + sites)
    made = roles.remove(file, tmp_path / "kits", site)
    assert file.read_bytes().decode() == HEAD + left
    assert (
        roles.load_project(file).sites == tuple(made.sites) == tuple(s for s in ("north", "south", "east") if s != site)
    )


@pytest.mark.slow
@pytest.mark.case("revoked sites", "a site is removed, and comes back with a new kit")
def test_a_site_that_left_is_refused_until_it_gets_a_new_kit(tmp_path: Path) -> None:
    file, before = provision_text(tmp_path, HEAD + IN_BRACKETS)
    old = (before.sites["south"] / "flare" / "startup" / "client.crt").read_bytes()
    roles.remove(file, tmp_path / "kits", "south")
    kit = load_kit(before.coordinator)
    assert kit.project.sites == ("north", "east")
    assert revoked_sites(kit) == {"south"}, "the name is remembered, and the other sites are accepted"
    assert (before.sites["south"] / "SITE.yaml").exists()
    _, again = provision_text(tmp_path, HEAD + IN_BRACKETS)
    assert (again.new, revoked_sites(load_kit(before.coordinator))) == (("south",), set())
    assert (before.sites["south"] / "flare" / "startup" / "client.crt").read_bytes() != old


@pytest.mark.case("revoked sites", "a site taken out of the project's file by hand, provisioned, and put back")
def test_a_site_that_was_taken_out_by_hand_is_refused_too(tmp_path: Path) -> None:
    _, made = provision_text(tmp_path, HEAD + IN_BRACKETS)
    provision_text(tmp_path, HEAD + "sites: [north, east]\n")
    assert revoked_sites(load_kit(made.coordinator)) == {"south"}
    provision_text(tmp_path, HEAD + IN_BRACKETS)
    assert revoked_sites(load_kit(made.coordinator)) == {"south"}, "its old kit may be in other hands by now"
    roles.set_revoked(made.coordinator, "south", False)
    assert revoked_sites(load_kit(made.coordinator)) == set()


@pytest.mark.slow
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
    file, made = provision_text(tmp_path, HEAD + IN_BRACKETS)
    file.write_text(HEAD + sites)
    before = {path: path.read_bytes() for path in (file, made.coordinator / "kit.json")}
    with one_line(message):
        roles.remove(file, tmp_path / out, site)
    assert {path: path.read_bytes() for path in before} == before
    assert not json.loads((made.coordinator / "certificates.json").read_text())["south"]["revoked"]


@pytest.mark.slow
def test_a_removal_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    file, made = provision_text(tmp_path, HEAD + IN_BRACKETS)
    text = file.read_bytes()
    roles.remove(file, tmp_path / "kits", "south")
    after = file.read_bytes()
    file.write_bytes(text)  # it is written last
    roles.remove(file, tmp_path / "kits", "south")
    assert (file.read_bytes(), revoked_sites(load_kit(made.coordinator))) == (after, {"south"})
