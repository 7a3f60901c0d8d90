"""A role's log, signed with the key of its kit, so that others can tell whether a line was changed since.

An export is the log with a line before it: who made it and when, the digest of every line, the certificate of the kit,
and the signature.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Base64Bytes

from fedshift.deploy.chained_log import checked_lines, digest_of, lines_of
from fedshift.deploy.secure.identity import signing
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.plain_values import Frozen
from fedshift.files import write_bytes
from fedshift.text import one_line

if TYPE_CHECKING:
    from cryptography import x509

    from fedshift.deploy.flare.kits import Kit

_FORMAT = 1


class Export(Frozen):
    """The first line of an export, all but its signature being what was signed, and the lines behind it."""

    fedshift_log: Literal[1]
    role: str
    name: str
    log: str
    made: str
    digests: tuple[str, ...]
    certificate: str
    signature: Base64Bytes
    lines: tuple[str, ...] = ()

    @property
    def moment(self) -> datetime.datetime:
        """When it was made."""
        moment = datetime.datetime.fromisoformat(self.made)
        if moment.tzinfo is None:
            raise ValueError("a time without its zone")
        return moment


def export_log(log: Path, kit: Kit, what: str, out: Path) -> int:
    """Write a signed copy of a log; return how many lines it has.

    UserError if there is no log, or the kit's key cannot be used; FedshiftError if the log's own chain is broken.
    ``what``: what the log is called in the export, such as ``audit`` or a deployment's name.
    """
    from cryptography.hazmat.primitives import serialization

    if not log.exists():
        raise UserError(f"there is no log at {log}")
    lines = checked_lines(log)
    stem = kit.flare / "startup" / ("server" if kit.role == "coordinator" else "client")
    try:
        key = serialization.load_pem_private_key(stem.with_suffix(".key").read_bytes(), None)
        certificate = stem.with_suffix(".crt").read_text(encoding="ascii")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the kit in {kit.folder} has no usable key: {error}") from None
    head = {
        "fedshift_log": _FORMAT,
        "role": kit.role,
        "name": kit.project.server if kit.role == "coordinator" else kit.name,
        "project": kit.project.name,
        "log": what,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digests": [digest_of(line) for line in lines],
        "certificate": certificate,
    }
    head["signature"] = base64.b64encode(key.sign(_signed_bytes(head), *signing())).decode()  # type: ignore[union-attr,call-arg]
    write_bytes(out, "".join(f"{line}\n" for line in (json.dumps(head), *lines)).encode(), private=True)
    return len(lines)


def read_export(file: Path, authority: Path) -> Export:
    """Read an export and check who signed it.

    UserError if a file cannot be read, or is something else; FedshiftError if the signature does not fit, or is not by
    a kit of this authority. ``authority``: the certificate of the project's authority (``rootCA.pem`` of any of its
    kits).
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        root = x509.load_pem_x509_certificate(authority.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{authority} is no readable certificate: name rootCA.pem of a kit of the project") from None
    try:
        first, *lines = file.read_bytes().decode(errors="replace").split("\n")
        head, signed = Export.model_validate_json(first), json.loads(first)
        moment, certificate = head.moment, x509.load_pem_x509_certificate(head.certificate.encode())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise FedshiftError(
            f"{file}: its first line is not that of an export: it was changed, or is something else"
        ) from None
    try:
        certificate.verify_directly_issued_by(root)
        public: Any = certificate.public_key()
        public.verify(head.signature, _signed_bytes(signed), *signing())
    except (ValueError, TypeError, AttributeError, InvalidSignature):
        raise FedshiftError(
            f"{file}: the signature of its first line does not fit: it was changed, or is not by a kit of this project"
        ) from None
    told = {name: one_line(getattr(head, name)) for name in ("role", "name", "log", "made")}
    if _owner(certificate) != told["name"]:
        raise FedshiftError(f"{file}: says that it is by '{told['name']}', and is signed by '{_owner(certificate)}'")
    if not certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc:
        raise FedshiftError(f"{file}: says that it was made at {told['made']}, when its certificate was not valid")
    return head.model_copy(update={**told, "lines": tuple(lines[:-1] if lines and not lines[-1] else lines)})


def first_difference(digests: Sequence[str], lines: Sequence[str], *, longer: bool = False) -> str | None:
    """The first line that is not as it was signed, in words; None if there is none. ``longer``: whether lines may have
    been added at the end."""
    now = [digest_of(line) for line in lines]
    pairs = zip(now, digests, strict=False)
    at = next((number for number, (ours, signed) in enumerate(pairs) if ours != signed), min(len(now), len(digests)))
    if at == len(digests):
        return None if longer or at == len(now) else f"line {at + 1} was added"
    if at == len(now) or now[at] in digests[at + 1 :]:
        return f"line {at + 1} was removed"
    if digests[at] in now[at + 1 :]:
        return f"line {at + 1} was added"
    return f"line {at + 1} was changed"


def verify_export(file: Path, authority: Path, log: Path | None = None) -> Export:
    """Check an export, and whether the log that it was made of still begins with its lines.

    Args:
        log: the log as it is now; None to check the export alone.

    Raises:
        UserError: a file cannot be read.
        FedshiftError: something was changed; names the first line.
    """
    export = read_export(file, authority)
    difference = first_difference(export.digests, export.lines)
    if difference is not None:
        raise FedshiftError(f"{file}: {difference} after it was signed (lines of the log, without the export's first)")
    if log is not None:
        difference = first_difference(export.digests, lines_of(log), longer=True)
        if difference is not None:
            raise FedshiftError(f"{log}: {difference} since {export.made}, when '{export.name}' signed it")
    return export


def _signed_bytes(head: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in head.items() if name != "signature"}, sort_keys=True).encode()


def _owner(certificate: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return one_line(str(names[0].value)) if names else ""
