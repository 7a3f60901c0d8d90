"""What those try who hold something: a copy of a site's kit, the authority, a file that they send; and a bad disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

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


def _experiment_with_code(played: Played) -> str:
    """A file beside the experiment would leave a mark; a function of Python would be called with shapes."""
    from fedshift.experiment.config.experiment import load

    folder = played.folder / "sent"
    folder.mkdir()
    mark = folder / "it-ran"
    (folder / "net.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    said = []
    for model in ("net.py:Net", "subprocess:Popen"):
        file = folder / "experiment.yaml"
        file.write_text(f"data: rotated_digits\nmodel: {{name: '{model}'}}\nmethods: [fedavg]\n", encoding="utf-8")
        try:
            load(file)
        except UserError as error:
            said.append(str(error).replace(str(folder), "there"))
        else:
            raise Broken(f"an experiment that names {model} is read")
    expect(not mark.exists(), "the file beside the experiment ran")
    return "; ".join(reversed(said))


def _honest_runs(played: Played, name: str) -> Path:
    """A copy of the honest experiment's runs."""
    place = played.folder / name / "honest"
    shutil.copytree(played.coordinator / "deployments" / "honest" / "runs" / "honest", place)
    return place


def _strange_pack(played: Played) -> str:
    """Packed runs whose method is two folders up; digests are written by who sends them, so there are none."""
    from fedshift.evaluation import packing
    from fedshift.evaluation.packs.packed import RUNS
    from fedshift.evaluation.stored import SUMS

    experiment = _honest_runs(played, "packs")
    packing.pack(experiment)
    (experiment / SUMS).unlink()
    file = experiment / RUNS
    file.write_text(file.read_text(encoding="utf-8").replace("fedavg", "..", 1), encoding="utf-8")
    before = sorted(played.folder.rglob("*"))
    try:
        packing.unpack(experiment)
    except UserError as error:
        expect(sorted(played.folder.rglob("*")) == before, "files were written or removed")
        return str(error).replace(str(experiment), "the experiment")
    raise Broken("such a pack is unpacked")


def _flipped_bits(played: Played) -> str:
    """One bit of each file of a finished run, at several places: what reads the file says so, or reads the same.

    The second is so where the bit is in the name under which a model holds its digest.
    """
    from fedshift.evaluation.stored import RESULT, ROUNDS
    from fedshift.experiment.predict import load_model
    from fedshift.report.collect import read_result, read_rounds

    experiment, noticed = _honest_runs(played, "flips"), 0

    def model(file: Path) -> object:
        found = load_model(file)
        return found.metadata, {name: tensor.tolist() for name, tensor in found.network.state_dict().items()}

    readers: dict[str, Callable[[Path], object]] = {
        RESULT: read_result,
        ROUNDS: read_rounds,
        "model.safetensors": model,
    }
    for file, read in ((next(experiment.rglob(name)), read) for name, read in readers.items()):
        whole, right = file.read_bytes(), read(file)
        for place in range(len(whole) // 40, len(whole), len(whole) // 20):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            try:
                expect(read(file) == right, f"bit {8 * place} of {file.name} changes what is read, without a word")
            except UserError:
                noticed += 1
        file.write_bytes(whole)
    return f"{noticed} flips in {len(readers)} files of a run, each refused with the file's name"


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
    Promise(
        "whoever sends you an experiment", "has it run code that lies beside it, or of Python", _experiment_with_code
    ),
    Promise("whoever sends you a model file", "has its network take gigabytes", _strange_model),
    Promise("whoever sends you packed results", "has unpack write outside of their folder", _strange_pack),
    Promise("a disk that fails", "changes a bit of a run, a record or a model", _flipped_bits),
)
AT_LAST = (
    Promise("whoever copied a site's kit", "uses it after it was revoked", _revoked_kit),
    Promise("whoever copied a site's kit", "uses it while the site does", _two_machines),
)
"""What disturbs a site of the federation comes last."""
