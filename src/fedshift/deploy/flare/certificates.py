"""Which certificates the coordinator accepts: a file in its kit, which its listener rereads.

Each name has one certificate. Any other certificate is refused, even if the authority signed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.deploy.flare.kits import Kit
from fedshift.deploy.flare.limits import CERTIFICATES
from fedshift.errors import UserError, nearest
from fedshift.files import hold_lock
from fedshift.json_objects import read_object, write_object

_LOCK = "certificates.lock"
"""Held while the list is read and written: two at once would lose a revocation."""


def write_issued(kit: Path, issued: Mapping[str, str]) -> None:
    """Write the certificates of all names into the coordinator's kit.

    A revoked certificate stays revoked. A new certificate of the same name is accepted. A name that is not in
    ``issued`` any more, of a site that has left the project, stays listed as revoked.

    Args:
        issued: name → SHA-256 of its certificate.
    """
    with hold_lock(kit / _LOCK):
        before = _read_list(kit)
        revoked = {item["certificate"] for item in before.values() if item["revoked"]}
        left = {name: {**item, "revoked": True} for name, item in before.items() if name not in issued}
        _write(kit, {name: {"certificate": item, "revoked": item in revoked} for name, item in issued.items()} | left)


def revoked_sites(kit: Kit) -> frozenset[str]:
    """The sites whose certificate the coordinator refuses, with those that have left the project.

    None if there is no list.

    Raises:
        Damaged: the list is.
    """
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
