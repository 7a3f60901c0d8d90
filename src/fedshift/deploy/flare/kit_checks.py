"""Checks of a kit before anything starts: its certificates, the way to the coordinator, the coordinator's port."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import time

from fedshift.deploy.flare.certificates import check_list
from fedshift.deploy.flare.kits import LAUNCHER_CLASS, Kit
from fedshift.deploy.json_files import plain_object
from fedshift.deploy.proxy import connect_to
from fedshift.errors import UserError

_DATES = ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_BAD_CERTIFICATE", 9, 10)
"""How TLS reports a certificate that is expired or not valid yet: the other side's alerts (the second means not valid
yet), and this side's codes X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def check_certificates(kit: Kit, now: datetime.datetime | None = None) -> datetime.datetime:
    """Check the kit's certificates; return when they expire. UserError if a certificate is missing, expired, not valid
    yet, for another name, or of another authority."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    now = now or datetime.datetime.now(datetime.UTC)
    startup = kit.flare / "startup"
    stem = "server" if kit.role == "coordinator" else "client"
    result: dict[str, x509.Certificate] = {}
    for file in (f"{stem}.crt", "rootCA.pem"):
        try:
            result[file] = x509.load_pem_x509_certificate((startup / file).read_bytes())
        except (OSError, ValueError):
            raise UserError(f"the kit in {kit.folder} lacks a readable {file}: unpack it again, whole") from None
    if not (startup / f"{stem}.key").exists():
        raise UserError(f"the kit in {kit.folder} lacks {stem}.key: unpack it again, whole")
    certificate, root = result[f"{stem}.crt"], result["rootCA.pem"]
    for what, item in (("certificate", certificate), ("authority", root)):
        if now < item.not_valid_before_utc:
            raise UserError(
                f"the kit's {what} is valid from {item.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and this machine's "
                f"clock says {now:%Y-%m-%d %H:%M} UTC: set the clock, or ask for a new kit"
            )
        if now > item.not_valid_after_utc:
            raise UserError(
                f"the kit's {what} expired at {item.not_valid_after_utc:%Y-%m-%d %H:%M} UTC (this machine's clock says "
                f"{now:%Y-%m-%d %H:%M} UTC): ask {kit.project.contact} for a new kit"
            )
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    expected = kit.project.server if kit.role == "coordinator" else kit.name
    if not names or names[0].value != expected:
        raise UserError(f"the kit's certificate is for '{str(names[0].value) if names else ''}', not for '{expected}'")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(
            f"the kit's certificate is not of its authority: ask {kit.project.contact} for a new kit"
        ) from None
    return min(certificate.not_valid_after_utc, root.not_valid_after_utc)


def check_settings(kit: Kit) -> None:
    """Check that the kit holds what a role needs, and no filter that would look like protection but do nothing.

    FLARE's filters see a message of ours as text and bytes under a digest. Those that come with FLARE look for arrays,
    find none, and report success; one that changed the bytes would break the digest.

    UserError if a filter is configured, or the coordinator's kit does not say which certificates it accepts.
    """
    if kit.role == "coordinator":
        check_list(kit)
    path = kit.flare / "local" / "privacy.json"
    if not path.exists():
        return
    filters = _filters(plain_object(path))
    if filters or not plain_object(path):
        raise UserError(
            f"{path}: FLARE's filters ({', '.join(filters) or 'this file'}) do nothing to fedshift's messages: remove "
            "the file; SITE.yaml says what leaves a site (policy.send, smallest_group, methods, rounds_per_day)"
        )


def check_launcher(kit: Kit) -> None:
    """Raise UserError unless a site's settings name our launcher of jobs, and no other: their jobs would not be locked
    down."""
    components = plain_object(kit.flare / "local" / "resources.json").get("components", [])
    paths = [str(part.get("path")) for part in components if isinstance(part, dict)]
    if [path for path in paths if path.endswith("Launcher")] != [LAUNCHER_CLASS]:
        raise UserError(
            f"{kit.flare / 'local' / 'resources.json'}: FLARE would start jobs that are not locked down: stop this "
            "site and start it with fedshift site start, which writes the file anew"
        )


def _filters(settings: object) -> list[str]:
    """The names of all filters in a privacy.json, at any depth."""
    if isinstance(settings, list):
        return [name for item in settings for name in _filters(item)]
    if not isinstance(settings, dict):
        return []
    names = [
        str(item.get("path") or item.get("name")).rpartition(".")[2]
        for key in ("task_data_filters", "task_result_filters")
        if isinstance(settings.get(key), list)
        for item in settings[key]
        if isinstance(item, dict)
    ]
    return names + [name for value in settings.values() for name in _filters(value)]


def check_reachable(kit: Kit, proxy: str | None = None, seconds: float = 5.0) -> str | None:
    """Check that the coordinator can be reached, through a proxy if there is one. Returns why it cannot be reached;
    None if it can. UserError if what answers is not this project's coordinator, or does not accept the kit."""
    address = (kit.project.server, kit.project.port)
    startup = kit.flare / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.check_hostname = False  # FLARE also checks only the authority: the name may be an alias
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    try:
        with connect_to(*address, proxy, seconds) as plain, context.wrap_socket(plain) as connection:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                ended = (
                    connection.recv(1) == b""
                )  # TLS reports a certificate of another authority only now, as an error
                if ended and kit.project.scheme == "tcp":  # grpc ends each connection that does not speak it
                    return (
                        f"{address[0]} port {address[1]}: it ends the connection at once; if it goes on doing so, this "
                        f"kit was revoked or replaced: ask {kit.project.contact}"
                    )
            return None
    except ssl.SSLError as error:
        if error.reason in _DATES or getattr(error, "verify_code", None) in _DATES:
            raise UserError(
                f"{address[0]} port {address[1]}: a certificate is not valid yet or no longer, by this machine's "
                f"clock ({datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC) or the coordinator's: compare the "
                f"clocks; if both are right, ask {kit.project.contact} for new kits"
            ) from None
        raise UserError(
            f"{address[0]} port {address[1]} does not accept this kit, or is not the coordinator of project "
            f"'{kit.project.name}' ({error.reason or error}): ask {kit.project.contact} for a new kit"
        ) from None
    except OSError as error:
        return f"{address[0]} port {address[1]}: {error.strerror or error}"


def check_port(kit: Kit, seconds: float = 10.0) -> None:
    """Check that the coordinator's port is free.

    A process that was killed a moment ago may hold the port for some seconds, so this waits.

    UserError if something listens on the port after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1" if kit.project.server == "localhost" else "", kit.project.port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"port {kit.project.port} cannot be used ({error.strerror}): end what listens there, or "
                        "provision with another port"
                    ) from None
        time.sleep(0.2)
