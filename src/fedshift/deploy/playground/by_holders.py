"""What those try who hold a copy of a site's kit, or the authority."""

from __future__ import annotations

import shutil
import time

from fedshift.deploy.flare import roles
from fedshift.deploy.playground.by_strangers import goes_on
from fedshift.deploy.playground.played import Played
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.errors import UserError


def _unlisted_certificate(played: Played) -> str:
    """With the authority's key: a certificate in a site's name that the coordinator's kit does not list."""
    twin, project = played.folder / "twin", roles.load_project(played.project)
    shutil.copytree(played.folder / "kits", twin, ignore=shutil.ignore_patterns("channel*", "*.sock"))
    site = next(iter(played.sites))
    roles.reissue(project, twin, site, lambda new: None)
    startup = twin / project.name / "sites" / site / "flare" / "startup"
    expect(not goes_on(played, startup), "a certificate that the coordinator does not list is accepted")
    expect(goes_on(played, played.sites[site] / "flare" / "startup"), "the site's own is refused, too")
    return "the connection is closed; the site's own certificate opens it"


def _copied_authority(played: Played) -> str:
    from fedshift.deploy.flare.authority import KEY as AUTHORITY_KEY

    kits, project = played.folder / "with passphrase", roles.load_project(played.project)
    made = roles.provision(project, kits, lambda new: "a passphrase")
    site = next(iter(made.sites))
    expect(b"ENCRYPTED" in (made.folder / "authority" / AUTHORITY_KEY).read_bytes(), "the key is not encrypted")
    try:
        roles.reissue(project, kits, site, lambda new: "another passphrase")
    except UserError as error:
        return f"the key is encrypted: {str(error).rpartition('/')[2]}"
    raise Broken("a certificate is signed with a wrong passphrase")


def _two_machines(played: Played) -> str:
    """The copy is started while the site itself is connected."""
    site = next(iter(played.sites))
    twin, text = played.folder / "stolen", f"the kit of site '{site}' is in use on two machines"
    shutil.copytree(played.sites[site], twin, ignore=shutil.ignore_patterns("channel", "service.*"))
    coordinator, deadline = roles.load_kit(played.coordinator, "coordinator"), time.monotonic() + 120
    try:
        roles.start(roles.load_kit(twin, "site"), twin / "SITE.yaml", wait=0)
        while text not in roles.status(coordinator).message:
            expect(time.monotonic() < deadline, "the coordinator does not say that two machines use one kit")
            time.sleep(0.5)
    finally:
        roles.stop(roles.load_kit(twin, "site"))
    return text


def _revoked_kit(played: Played) -> str:
    *others, site = played.sites
    roles.set_revoked(played.coordinator, site, True)
    try:
        deadline = time.monotonic() + 10
        while goes_on(played, played.sites[site] / "flare" / "startup"):
            expect(time.monotonic() < deadline, "a revoked kit opens a connection")
            time.sleep(0.2)
        expect(goes_on(played, played.sites[others[0]] / "flare" / "startup"), "another site is refused, too")
    finally:
        roles.set_revoked(played.coordinator, site, False)
    return f"the kit of '{site}' opens no connection, that of '{others[0]}' does"


PROMISES = (
    Promise("the holder of authority", "poses as a site at the coordinator", _unlisted_certificate),
    Promise("whoever copied authority", "signs certificates without the passphrase", _copied_authority),
)
AT_LAST = (
    Promise("whoever copied a site's kit", "uses it after it was revoked", _revoked_kit),
    Promise("whoever copied a site's kit", "uses it while the site does", _two_machines),
)
"""What disturbs a site of the federation comes last."""
