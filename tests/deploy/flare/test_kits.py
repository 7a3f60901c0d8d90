"""Projects and start-up kits: what FLARE's provisioning makes of them, and what can be wrong with one."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from outcomes import one_line

from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.kit_checks import check_certificates, check_port, check_reachable
from fedshift.deploy.flare.kits import Kit, load_kit
from fedshift.deploy.flare.provision import Provisioned, relocate
from fedshift.deploy.flare.service import Service
from fedshift.deploy.remote.policy import Policy
from fedshift.errors import UserError
from fedshift.json_objects import read_object
from tried import slow, slow_after

PROJECT: dict[str, Any] = {
    "name": "hearts",
    "contact": "team@example.org",
    "server": "localhost",
    "port": 8002,
    "sites": ["north", "south"],
}


def project_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "project.yaml"
    file.write_text(yaml.safe_dump({**PROJECT, **changes}))
    return file


def provision_project(folder: Path, **changes: Any) -> Provisioned:
    return roles.provision(roles.load_project(project_file(folder, **changes)), folder, lambda new: None)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision_project(tmp_path_factory.mktemp("kits"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": ["north", "North"]}, "two sites are called"),
        ({"sites": []}, "sites"),
        ({"sites": ["a/b"]}, "cannot be a site's name"),
        ({"sites": ["coordinator"]}, "reserved word"),
        ({"contact": "nobody"}, "e-mail"),
        ({"port": 0}, "port"),
        ({"sorver": "x"}, "sorver"),
        ({"name": "../x"}, "letters, digits"),
    ],
)
def test_a_mistake_in_a_project_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with one_line(message):
        roles.load_project(project_file(tmp_path, **change))


@pytest.mark.threat("other_user_kits")
def test_every_role_gets_its_own_keys_and_no_other(kits: Provisioned) -> None:
    assert kits.new == ("coordinator", "north", "south")
    keys = {path.read_bytes() for path in kits.folder.rglob("*.key") if "authority" not in path.parts}
    assert len(keys) == 4  # the server's, its administrator's, two sites'
    for site in kits.sites.values():
        assert len(list(site.rglob("*.key"))) == 1
        assert not list(site.rglob("*.sh.key"))
        assert (next(site.rglob("*.key")).stat().st_mode & 0o077) == 0
    assert (kits.folder / "authority").stat().st_mode & 0o077 == 0


def test_settings_of_a_kit(kits: Provisioned) -> None:
    assert not list(kits.folder.glob("**/flare/**/*.sh"))  # they would start FLARE as it is
    """Own classes only, no code of a job's, no shell, no logs to the coordinator, nothing in a shared folder."""
    for kit in (kits.coordinator, *kits.sites.values()):
        local = kit / "flare" / "local"
        resources = json.loads((local / "resources.json").read_text())
        ours = [name for name in resources["class_allow_list"] if name.startswith("fedshift")]
        assert (len(ours), resources["class_list_enforcement_mode"]) == (1, "enforce")
        rights = json.loads((local / "authorization.json").read_text())["permissions"]
        assert (list(rights), rights["project_admin"]["byoc"]) == (["project_admin"], "none")
        assert rights["project_admin"]["shell_commands"] == "none"
        assert "/tmp/nvflare" not in (local / "resources.json").read_text()
        if kit != kits.coordinator:
            assert resources["allow_log_streaming"] is False
            assert "site_log_streamer" not in {part["id"] for part in resources["components"]}


@pytest.mark.parametrize("scheme", slow_after(1, ["tcp", "grpc", "http"]))
def test_the_coordinator_listens_with_the_projects_scheme_and_sites_dial_it(scheme: str, tmp_path: Path) -> None:
    made = provision_project(tmp_path, scheme=scheme, sites=["north"], largest_message=100)
    relocate(load_kit(made.coordinator))  # as at each start
    service = json.loads((made.coordinator / "flare/startup/fed_server.json").read_text())["servers"][0]["service"]
    other = json.loads((made.sites["north"] / "flare/startup/fed_client.json").read_text())["servers"][0]["service"]
    assert (service["scheme"], other["scheme"]) == ("guarded" if scheme == "tcp" else scheme, scheme)
    for kit in (made.coordinator, made.sites["north"]):
        channels = json.loads((kit / "flare/local/comm_config.json").read_text())
        assert channels["streaming_max_blob_size"] == 100 << 20


def test_a_message_that_no_role_would_take_is_not_sent() -> None:
    """FLARE would end the process that sends it, and the job with it."""
    from fedshift.deploy.flare.engine import check_size
    from fedshift.deploy.remote.wire import Message

    check_size(Message("{}", bytes(900 << 10), ""), 1)
    with pytest.raises(UserError, match="largest_message"):
        check_size(Message("{}", bytes(1 << 20), ""), 1)


def test_the_site_file_of_a_kit_has_the_defaults_of_every_rule(kits: Provisioned) -> None:
    """Each with a comment or a list to choose from, except limits that say what they are."""
    text = (kits.sites["north"] / "SITE.yaml").read_text()
    written = yaml.safe_load(text)["policy"]
    assert (set(written), Policy.model_validate(written)) == (set(Policy.model_fields), Policy())
    assert all("#" in line for line in text.splitlines() if line.strip().startswith(("models", "splits", "exposure")))


@pytest.mark.slow
def test_a_site_that_is_added_later_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    first = provision_project(tmp_path)
    before = {path: path.read_bytes() for path in first.sites["north"].rglob("*") if path.is_file()}
    (first.sites["north"] / "SITE.yaml").write_text("site: north  # filled in\n")
    more = provision_project(tmp_path, sites=["north", "south", "east"])
    assert more.new == ("east",)
    for path, content in before.items():
        if path.name != "SITE.yaml":
            assert path.read_bytes() == content
    root = (more.sites["east"] / "flare/startup/rootCA.pem").read_bytes()
    assert root == (more.coordinator / "flare/startup/rootCA.pem").read_bytes()
    assert Deployment(more.coordinator, "x").sites == ["north", "south", "east"]
    anew = roles.provision(roles.load_project(tmp_path / "project.yaml"), tmp_path, lambda new: None, renew=True)
    assert (anew.sites["east"] / "flare/startup/rootCA.pem").read_bytes() != root
    assert (anew.sites["north"] / "SITE.yaml").read_text() == "site: north  # filled in\n"


def settings_of(kit: Path) -> dict[str, str]:
    """All that FLARE reads in a kit, without the kit's own place."""
    files = [*kit.glob("flare/startup/*.json"), *kit.glob("flare/local/*.json"), *kit.glob("admin/startup/*.json")]
    return {str(file.relative_to(kit)): file.read_text().replace(str(kit), "KIT") for file in files}


MOVED: dict[str, Any] = {"port": 18742, "scheme": "grpc", "largest_message": 99}


@pytest.mark.slow
@pytest.mark.case("stale kits", "port, scheme and largest message change after kits were handed out")
@pytest.mark.parametrize("changes", slow_after(1, [{"port": 18742}, MOVED, {**MOVED, "server": "fl.example.org"}]))
def test_a_site_needs_only_another_kit_json_when_the_coordinator_moves(changes: dict[str, Any], tmp_path: Path) -> None:
    first, fresh = provision_project(tmp_path / "a"), provision_project(tmp_path / "fresh", **changes)
    handed = tmp_path / "at north"
    shutil.copytree(first.sites["north"], handed)
    keys = {path: path.read_bytes() for path in handed.rglob("*.key")}
    made = provision_project(tmp_path / "a", **changes)
    assert made.changed.keys() == {"north", "south"}
    assert all(f"{name} " in " ".join(made.changed["north"]) for name in changes)
    shutil.copy(made.sites["north"] / "kit.json", handed / "kit.json")
    relocate(load_kit(handed))  # as at each start
    expected = settings_of(fresh.sites["north"])
    assert settings_of(made.sites["north"]) == settings_of(handed) == expected
    assert settings_of(made.coordinator) == settings_of(fresh.coordinator)
    assert {path: path.read_bytes() for path in handed.rglob("*.key")} == keys
    check_certificates(load_kit(made.coordinator))
    check_certificates(load_kit(handed))
    assert provision_project(tmp_path / "a", **changes).changed == {}


@pytest.mark.case("stale kits", "a kit that names the classes and folders of an earlier fedshift")
def test_a_kit_of_an_earlier_fedshift_runs_the_classes_of_this_one(tmp_path: Path) -> None:
    """The rooms of deployments had another name; each start writes what FLARE reads anew."""
    made = provision_project(tmp_path)
    for kit in (made.coordinator, made.sites["north"]):
        before = settings_of(kit)
        for file in (kit / "flare" / "local").glob("*.json"):
            text = file.read_text().replace("fedshift.deploy.", "fedshift.deployment.")
            file.write_text(text.replace("fedshift/deploy/", "fedshift/deployment/"))
        assert settings_of(kit) != before
        relocate(load_kit(kit))  # as at each start
        assert settings_of(kit) == before


@pytest.mark.slow
@pytest.mark.case("stale kits", "a kit that is not on this machine any more")
@pytest.mark.case("stale kits", "another contact, whose certificate the coordinator lacks")
def test_kits_that_are_elsewhere_and_another_contact(tmp_path: Path) -> None:
    made = provision_project(tmp_path)
    shutil.rmtree(made.sites["north"])
    again = provision_project(tmp_path, contact="others@example.org")
    assert again.changed.keys() == {"north", "south"}
    assert json.loads((again.sites["north"] / "kit.json").read_text())["name"] == "north"
    certificates = read_object(made.coordinator / "certificates.json")
    assert {name for name, entry in certificates.items() if entry["revoked"]} == {PROJECT["contact"]}
    assert "others@example.org" in (made.coordinator / "admin" / "startup" / "fed_admin.json").read_text()


@pytest.mark.case("stale kits", "a new kit is asked for, or a site removed, before the coordinator has its new name")
def test_a_new_name_is_provisioned_first(tmp_path: Path) -> None:
    provision_project(tmp_path)
    file = project_file(tmp_path, server="fl.example.org")
    for act in (
        lambda: roles.reissue(roles.load_project(file), tmp_path, "north", lambda new: None),
        lambda: roles.remove(file, tmp_path, "north"),
    ):
        with pytest.raises(UserError, match=r"server localhost → fl\.example\.org.*fedshift project provision"):
            act()


def test_a_kit_that_was_moved_keeps_its_files_below_it(tmp_path: Path) -> None:
    made = provision_project(tmp_path / "here")
    moved = tmp_path / "there"
    shutil.move(made.coordinator, moved)
    relocate(load_kit(moved))
    text = (moved / "flare/local/resources.json").read_text()
    assert str(moved) in text
    assert str(made.coordinator) not in text


def test_certificates(kits: Provisioned) -> None:
    kit = load_kit(kits.sites["north"], "site")
    expiry = check_certificates(kit)
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    assert now + 300 * day < expiry < now + 400 * day
    with pytest.raises(UserError, match=r"expired at .* ask team@example.org"):
        check_certificates(kit, expiry + day)
    with pytest.raises(UserError, match=r"valid from .* this machine's clock says .* set the clock"):
        check_certificates(kit, now - 2 * day)


@pytest.mark.slow
def test_kits_that_are_wrong(kits: Provisioned, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the kit of a site, not of a coordinator"):
        load_kit(kits.sites["north"], "coordinator")
    with pytest.raises(UserError, match="holds no start-up kit"):
        load_kit(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(kits.sites["north"], other)
    shutil.copy(kits.sites["south"] / "flare/startup/client.crt", other / "flare/startup")
    with pytest.raises(UserError, match="certificate is for 'south', not for 'north'"):
        check_certificates(load_kit(other))
    (other / "flare/startup/client.crt").write_text("nonsense")
    with pytest.raises(UserError, match=r"lacks a readable client.crt"):
        check_certificates(load_kit(other))
    foreign = provision_project(tmp_path / "foreign")
    mixed = tmp_path / "mixed"
    shutil.copytree(kits.sites["north"], mixed)
    shutil.copy(foreign.sites["north"] / "flare/startup/rootCA.pem", mixed / "flare/startup")
    with pytest.raises(UserError, match="not of its authority"):
        check_certificates(load_kit(mixed))


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        kit = load_kit(provision_project(tmp_path, port=taken.getsockname()[1]).coordinator)
        with pytest.raises(UserError, match=r"port \d+ cannot be used .*provision with another port"):
            check_port(kit, seconds=0.1)


def answering(kit: Path, stop: threading.Event, patience: float = 2.0) -> int:
    """A TLS server with a coordinator's certificate that wants its clients' certificates, as FLARE's does.

    It waits for so many seconds until it ends a connection: longer than a client waits.
    """
    startup = kit / "flare" / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", roles.free_port()))
    listener.settimeout(0.2)

    def serve() -> None:
        with listener:
            while not stop.is_set():
                try:
                    plain, _ = listener.accept()
                    with context.wrap_socket(plain, server_side=True) as connection:
                        connection.settimeout(patience or None)
                        connection.recv(int(patience > 0))
                except OSError:
                    continue

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["tcp", "grpc"])
def test_a_connection_that_ends_at_once_is_a_refusal_but_for_grpc(scheme: str, kits: Provisioned) -> None:
    stop = threading.Event()
    try:
        kit = load_kit(kits.sites["north"])
        here = {"port": answering(kits.coordinator, stop, patience=0.0), "scheme": scheme}
        reason = check_reachable(Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update=here)))
    finally:
        stop.set()
    assert ("revoked or replaced" in str(reason)) == (scheme == "tcp")


def test_reaching_the_coordinator(kits: Provisioned, tmp_path: Path) -> None:
    stop = threading.Event()
    try:
        port = answering(kits.coordinator, stop)

        def kit_of(made: Provisioned) -> Kit:
            kit = load_kit(made.sites["north"])
            return Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": port}))

        assert check_reachable(kit_of(kits)) is None
        with pytest.raises(UserError, match=r"kit.*'hearts'"):
            check_reachable(kit_of(provision_project(tmp_path)))
    finally:
        stop.set()
    kit = load_kit(kits.sites["north"])
    nobody = Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": roles.free_port()}))
    assert "refused" in str(check_reachable(nobody)).lower()


def write_certificates(kit: Path, stem: str, authority: Path, begin: int, end: int) -> None:
    """Give a kit's certificate other dates, in days from now; signed by the project's authority all the same."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key((authority / "rootCA.key").read_bytes(), None)
    file = kit / "flare" / "startup" / f"{stem}.crt"
    old, now = x509.load_pem_x509_certificate(file.read_bytes()), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(now + datetime.timedelta(begin)).not_valid_after(now + datetime.timedelta(end))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("dates", [(1, 30), slow((-30, -1))])
@pytest.mark.parametrize("whose", ["server", slow("client")])
def test_a_clock_that_is_wrong_is_said_in_one_line(dates: tuple[int, int], whose: str, tmp_path: Path) -> None:
    """A certificate out of its dates by one side's clock: the site's sees the coordinator's so, or the other way."""
    made = provision_project(tmp_path)
    write_certificates(
        made.coordinator if whose == "server" else made.sites["north"], whose, made.folder / "authority", *dates
    )
    stop = threading.Event()
    try:
        port = answering(made.coordinator, stop)
        kit = load_kit(made.sites["north"])
        kit = Kit(kit.folder, kit.role, kit.name, kit.project.model_copy(update={"port": port}))
        with one_line("clocks"):
            check_reachable(kit)
    finally:
        stop.set()
    if whose == "client":
        message = r"valid from .* set the clock" if dates[0] > 0 else r"expired at .* clock says"
        with pytest.raises(UserError, match=message):
            check_certificates(kit)


def test_a_site_that_cannot_reach_the_coordinator_says_so_and_tries_again(tmp_path: Path) -> None:
    kit = load_kit(provision_project(tmp_path, port=roles.free_port()).sites["north"])
    service = Service(kit)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 4:
            service.stopping.set()
        return False

    messages: list[str] = []
    service.say = lambda state, message, severity=0: messages.append(f"{state} {message}")
    service.stopping.wait = wait
    service.run()
    assert (waits, messages[0].strip()) == ([1.0, 2.0, 4.0, 8.0], "starting")
    assert all("cannot reach the coordinator at localhost port" in line for line in messages[1:5])


@pytest.mark.case(
    "stale kits", "a site that runs while its coordinator is gone: FLARE's process tries again and is silent"
)
def test_a_site_that_lost_its_coordinator_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = load_kit(provision_project(tmp_path, port=roles.free_port()).sites["north"])
    service, now = Service(kit), 1000.0
    service.child = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr("fedshift.deploy.flare.service.time.monotonic", lambda: now)

    def state_after(looks: int) -> tuple[str, str]:
        nonlocal now
        for _ in range(looks):
            now += 60
            service._look_at_line()
        stored = json.loads((kit.folder / "service.json").read_text())
        return stored["state"], stored["message"]

    with socket.create_server(("localhost", kit.project.port)) as door:
        with socket.create_connection(("localhost", kit.project.port)):
            peer, _ = door.accept()
            assert state_after(4)[0] == "connected"
            peer.close()
        assert state_after(2)[0] == "connected", "it may be reconnecting"
        state, message = state_after(1)
        assert state == "retrying"
        for part in (f"localhost port {kit.project.port}", PROJECT["contact"], "kit.json"):
            assert part in message
        assert "WARNING" in (kit.folder / "service.log").read_text().splitlines()[-1]
        with socket.create_connection(("localhost", kit.project.port)):
            assert state_after(1)[0] == "connected"


def test_names_of_deployments(kits: Provisioned) -> None:
    for name in ("../x", "", "a/b", ".x"):
        with pytest.raises(UserError, match="no name of a deployment"):
            Deployment(kits.coordinator, name)
    with pytest.raises(UserError, match="there is no deployment 'x'"):
        Deployment.find(kits.coordinator, "x")
