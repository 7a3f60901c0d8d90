"""What those try who hold something: a copy of a site's kit, the authority, a model file that they hand on."""

from __future__ import annotations

import json
import shutil
import time

from fedshift.deployment.flare import roles
from fedshift.errors import UserError
from fedshift.playground.by_strangers import goes_on
from fedshift.playground.played import Played
from fedshift.playground.promise import Broken, Promise, expect


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
    from fedshift.deployment.flare.authority import KEY as AUTHORITY_KEY

    place, project = played.folder / "with passphrase", roles.load_project(played.project)
    made = roles.provision(project, place, lambda new: "a passphrase")
    site = next(iter(made.sites))
    expect(b"ENCRYPTED" in (made.folder / "authority" / AUTHORITY_KEY).read_bytes(), "the key is not encrypted")
    try:
        roles.reissue(project, place, site, lambda new: "another passphrase")
    except UserError as error:
        return f"the key is encrypted: {str(error).rpartition('/')[2]}"
    raise Broken("a certificate is signed with a wrong passphrase")


def _strange_model(played: Played) -> str:
    """The model of the honest run, which says of itself that it has layers of three thousand units."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from fedshift.experiment.predict import load_model

    honest = next((played.coordinator / "deployments" / "honest" / "runs").rglob("model.safetensors"))
    with safe_open(honest, framework="pt") as file:
        metadata = json.loads(file.metadata()["fedshift"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    load_model(honest)
    strange = played.folder / "strange" / "model.safetensors"
    strange.parent.mkdir()
    whole = {**metadata, "model": {"name": "mlp", "hidden": [30_000, 30_000]}}
    save_file(tensors, strange, {"fedshift": json.dumps(whole)})
    try:
        load_model(strange)
    except UserError as error:
        expect("damaged" in str(error), f"the file is refused for something else: {error}")
        return str(error).replace(str(strange), "the file")
    raise Broken("a network that the file has no room for is made")


def _two_machines(played: Played) -> str:
    """The copy is started while the site itself is connected."""
    site = next(iter(played.sites))
    twin, said = played.folder / "stolen", f"the kit of site '{site}' is in use on two machines"
    shutil.copytree(played.sites[site], twin, ignore=shutil.ignore_patterns("channel", "service.*"))
    coordinator, deadline = roles.load_kit(played.coordinator, "coordinator"), time.monotonic() + 120
    try:
        roles.start(roles.load_kit(twin, "site"), twin / "SITE.yaml", wait=0)
        while said not in roles.status(coordinator).message:
            expect(time.monotonic() < deadline, "the coordinator does not say that two machines use one kit")
            time.sleep(0.5)
    finally:
        roles.stop(roles.load_kit(twin, "site"))
    return said


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
    Promise("whoever sends you a model file", "has its network take gigabytes", _strange_model),
)
AT_LAST = (
    Promise("whoever copied a site's kit", "uses it after it was revoked", _revoked_kit),
    Promise("whoever copied a site's kit", "uses it while the site does", _two_machines),
)
"""What disturbs a site of the federation comes last."""
