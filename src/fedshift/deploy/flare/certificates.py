"""Certificates of a project: those that the coordinator accepts, and the authority that issued them.

Each name has one certificate, as a file in the coordinator's kit says, which its listener rereads. Any other one is
refused, even if the authority signed it. The private key of the authority is in an encrypted file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deploy.flare.kits import Kit
from fedshift.deploy.flare.limits import CERTIFICATES
from fedshift.deploy.json_files import plain_object
from fedshift.digests import Damaged
from fedshift.errors import UserError, nearest
from fedshift.files import hold_lock, write_bytes
from fedshift.json_objects import read_object, write_object

_LOCK = "certificates.lock"
"""Held while the list is read and written: two at once would lose a revocation."""


def write_issued(kit: Path, issued: Mapping[str, str]) -> None:
    """Write the certificates of all names into the coordinator's kit.

    A revoked certificate stays revoked. A new certificate of the same name is accepted. A name that is not in
    ``issued`` any more, of a site that has left the project, stays listed as revoked. ``issued``: name → SHA-256 of its
    certificate.
    """
    with hold_lock(kit / _LOCK):
        before = _read_list(kit)
        revoked = {item["certificate"] for item in before.values() if item["revoked"]}
        left = {name: {**item, "revoked": True} for name, item in before.items() if name not in issued}
        _write(kit, {name: {"certificate": item, "revoked": item in revoked} for name, item in issued.items()} | left)


def revoked_sites(kit: Kit) -> frozenset[str]:
    """The sites whose certificate the coordinator refuses, with those that have left the project. Empty if there is no
    list. Damaged if the list is."""
    result = _read_list(kit.folder)
    unlisted = [site for site in kit.project.sites if result and site not in result]
    return frozenset([*unlisted, *(name for name, item in result.items() if item.get("revoked", True))])


def set_revoked(kit: Kit, site: str, revoked: bool) -> bool:
    """Refuse a site's certificate from now on, or accept it again; return whether this changed anything."""
    check_list(kit)
    with hold_lock(kit.folder / _LOCK):
        result = _read_list(kit.folder)
        if site not in kit.project.sites or site not in result:
            raise UserError(f"project '{kit.project.name}' has no site '{site}'; {nearest(site, kit.project.sites)}")
        changed = bool(result[site]["revoked"] != revoked)
        result[site]["revoked"] = revoked
        _write(kit.folder, result)
    return changed


def check_list(kit: Kit) -> None:
    """Raise UserError if the coordinator's kit does not say which certificates it accepts."""
    if not _read_list(kit.folder):
        raise UserError(
            f"the kit in {kit.folder} has no readable {CERTIFICATES}, since an earlier fedshift made it: fedshift "
            "project provision adds it, and all kits stay valid"
        )


def _read_list(kit: Path) -> dict[str, Any]:
    return read_object(
        kit / CERTIFICATES,
        "restore it; or delete it, call fedshift project provision, and revoke again whom you had revoked",
        older=True,
    )


def _write(kit: Path, entries: Mapping[str, object]) -> None:
    write_object(kit / CERTIFICATES, entries, private=True)


CERTIFICATE, KEY, ISSUED = "rootCA.pem", "rootCA.key", "issued.json"
RENEW = "restore it, or make all kits anew with fedshift project provision --renew"
"""What to do about damaged files of the authority."""

Ask = Callable[[bool], str | None]
"""Asks for the passphrase of the authority's key. The argument says whether it is chosen now. None: no passphrase."""


@dataclass
class Authority:
    """The key and certificate that sign kits, and name → SHA-256 of the name's present certificate."""

    certificate: bytes
    key: Any
    issued: dict[str, str]

    @classmethod
    def load(cls, folder: Path, project: str, ask: Ask) -> Authority | None:
        """The authority in a folder, or None if there is none yet. UserError if the key cannot be read with that
        passphrase. ``ask``: asks for the passphrase, if the key is encrypted or was written by an earlier fedshift."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if not (folder / KEY).exists():
            return cls._adopt(folder, project, ask)
        text = (folder / KEY).read_bytes()
        passphrase = ask(False) if b"ENCRYPTED" in text else None
        try:
            key = load_pem_private_key(text, passphrase.encode() if passphrase else None)
        except (ValueError, TypeError):
            raise UserError(f"{folder / KEY} cannot be read with this passphrase") from None
        _check_own(folder / CERTIFICATE, key)
        return cls((folder / CERTIFICATE).read_bytes(), key, dict(read_object(folder / ISSUED, RENEW, older=True)))

    @classmethod
    def _adopt(cls, folder: Path, project: str, ask: Ask) -> Authority | None:
        """Convert the authority of an earlier fedshift, which had FLARE's form and every key unencrypted."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        state = plain_object(folder / project / "state" / "cert.json")
        if not state:
            return None
        issued = {name: digest(item["cert"].encode()) for name, item in state.items() if isinstance(item, dict)}
        result = cls(state["root_cert"].encode(), load_pem_private_key(state["root_pri_key"].encode(), None), issued)
        result.save(folder, ask(True))
        shutil.rmtree(folder / project)
        return result

    def save(self, folder: Path, passphrase: str | None) -> None:
        """Write certificate and key; the key encrypted if there is a passphrase."""
        from cryptography.hazmat.primitives import serialization

        how: Any = serialization.NoEncryption()
        if passphrase:
            how = serialization.BestAvailableEncryption(passphrase.encode())
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        write_bytes(folder / CERTIFICATE, self.certificate, private=True)
        write_bytes(folder / KEY, self.key.private_bytes(pem, pkcs8, how), private=True)
        self.save_issued(folder)

    def save_issued(self, folder: Path) -> None:
        """Write which certificate each name has."""
        write_object(folder / ISSUED, self.issued, private=True)


def _check_own(file: Path, key: Any) -> None:
    """Raise Damaged unless a file holds the certificate of this key, which the key signed."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        certificate.verify_directly_issued_by(certificate)
        fits = certificate.public_key() == key.public_key()
    except (OSError, ValueError, TypeError, InvalidSignature):
        fits = False
    if not fits:
        raise Damaged(file, RENEW)


def digest(certificate: bytes) -> str:
    """The SHA-256 of a certificate in PEM, which the coordinator's listener compares with what a peer presents."""
    import ssl

    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).hexdigest()
