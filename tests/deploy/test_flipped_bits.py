"""A flipped bit in whatever fedshift stores and reads again is noticed, with the file's name, or changes nothing.

`KINDS` has one entry for each kind of file. Files of runs are in `tests/experiment/runs/test_bit_flips.py`.
"""

from __future__ import annotations

import ast
import datetime
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from loopback import SETTING

import fedshift
from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.crypto.masked_sums import Order, PrivateKey, SecureSite
from fedshift.deploy.estimates import Threshold, keep_sums, kept_sums, note_estimated, read_estimated, threshold_file
from fedshift.deploy.flare.certificates import CERTIFICATE, ISSUED, KEY, Authority, revoked_sites, write_issued
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.kits import Kit, Project
from fedshift.deploy.flare.roles import status
from fedshift.deploy.json_files import CARDS, read_cards, read_stored
from fedshift.deploy.kept_scores import KeptScores, asked_reading, keep_scores, kept_scores, note_reading
from fedshift.deploy.privacy.ledger import LEDGER, SECRET, PrivacyLedger
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.deploy.remote.requests import CallAnswer, RunRequest, SeedSplit, SitePart
from fedshift.deploy.remote.transport import answer_of
from fedshift.deploy.remote.wire import body_of
from fedshift.deploy.secure.site_seals import Boxes, SealingKey
from fedshift.deploy.secure.site_sums import ROSTERS, Rosters
from fedshift.deploy.site_cards import GivenPrivacy, noted_spending
from fedshift.deploy.site_requests import keep_answer, kept_answer
from fedshift.errors import FedshiftError
from fedshift.evaluation import packing
from fedshift.evaluation.estimate.combination import Answers
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.plain_sums import GivenSums, plain_sums
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.evaluation.site_bytes import read_site_bytes, write_site_bytes
from fedshift.evaluation.stored import pack_of, read_failure, read_order
from fedshift.experiment.runs.run_folder import RunFolder, model_file
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.setting_json import SettingRecipe
from fedshift.files import write_bytes
from fedshift.functional.differential_privacy import NoisySteps
from fedshift.json_objects import write_object
from fedshift.models import registry as models
from fedshift.models.pretrained import read_weights
from fedshift.weights import Weights

FLIPS = 20
SUMS = GivenSums.model_validate(plain_sums(sums_of([[0.9, 0.1], [0.4, 0.6]], [0, 0])))
ENVELOPE = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5}
SPLIT = SeedSplit(test_fraction=0.3, split="auto", seed=0)
PART = SitePart(role="source", number=0, split=SPLIT, whole=False, fingerprint="f")
RECIPE = SettingRecipe.model_validate(SETTING, strict=False)
REQUEST = RunRequest(
    do="call", run="r", routing="sealed", setting=RECIPE, part=PART, kept={}, checkpoint=0, wire="float32"
)
PROJECT = Project(name="p", contact="a@example.org", server="localhost", port=8002, sites=("north", "south"))
MODEL = Weights({"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(4)})


HALVES = np.full((4, 2), 0.5, dtype=np.float32)
LOOKED_AT = (Answers(HALVES, np.zeros(4, dtype=np.int64), np.ones((4, 4, 2)), Apart(0.1, None, 0.2)),)
KEPT = KeptScores(HALVES, np.zeros(4, dtype=np.int64), looked_at=LOOKED_AT)


def kept_numbers(kept: KeptScores) -> list[Any]:
    (looked,) = kept.looked_at
    return [kept.scores.tolist(), looked.scores.tolist(), looked.nearby.tolist(), looked.apart]


class Kind(NamedTuple):
    """A kind of file: its writer, where it lies, and its reader, which raises if it is damaged."""

    write: Callable[[Path], object]
    file: str
    read: Callable[[Path], Any]


class Noticed(FedshiftError):
    """A reader that raises nothing has told of the damage in its own way, such as a warning."""


def outcome_of(content: Any, damaged: bool, text: str = "") -> Any:
    """What a reader found, unless it told of damage."""
    if damaged:
        raise Noticed(text)
    return content


# At a site ------------------------------------------------------------------------------------------------------------


def write_ledger(folder: Path) -> None:
    ledger = PrivacyLedger(folder, "north", None)
    for number in range(3):
        ledger.pay(ledger.mark(number=number), NoisySteps(2.0, 0.1, 100 + number))


def write_log(folder: Path) -> None:
    log = AuditLog(folder / "audit.jsonl")
    for number in range(3):
        log.append(do="call", call="fit", run="r", round=number)


def write_rosters(folder: Path) -> None:
    rosters = Rosters(folder, "north", Policy(roster="any"))
    for names in (["east", "north", "up"], ["east", "north", "south"]):
        rosters.note(names, "r")


def site_in(folder: Path, name: str = "a") -> SecureSite:
    return SecureSite(name, "r", folder / name, lambda text: b"signed", lambda card, text: True)


def order_of(folder: Path) -> Order:
    return Order("r", 1, "fit", "aa", tuple(site_in(folder, name).card() for name in "abc"))


def mask_one(folder: Path) -> None:
    site, order = site_in(folder), order_of(folder)
    site.mask(order, torch.arange(5))
    site.confirm(order, "abc")
    site.once("model", "question")


def asked_again(folder: Path) -> object:
    """A site whose records say what they said repeats its answers."""
    site, order = site_in(folder), order_of(folder)
    upload = site.mask(order, torch.arange(5))
    site.confirm(order, "abc")
    site.once("model", "question")
    return upload.numbers.tolist(), dict(upload.sealed), dict(upload.commitments)


def write_terms(folder: Path) -> None:
    terms = AgreedTerms(folder, "north", Policy())
    terms.check(network=models.parse({"name": "mlp", "hidden": [4]}), agree=True)


def boxes_in(folder: Path) -> Boxes:
    return Boxes("north", folder, None, None)  # type: ignore[arg-type] - neither is asked


def write_boxes(folder: Path) -> None:
    boxes_in(folder).note_setting(REQUEST)
    boxes_in(folder).note({"south": 3, "": 3}, 4.0)


def read_boxes(folder: Path) -> None:
    boxes_in(folder).check_setting(REQUEST)
    boxes_in(folder).check_newer({"south": 3}, 5.0)


def write_answer(folder: Path) -> None:
    answer = CallAnswer(mini_batches=1, memory={"optimizer": "o"})
    keep_answer(folder, 1, "k" * 64, answer_of("k" * 64, answer, body_of({"weights": MODEL})))


def read_answer(folder: Path) -> object:
    answer = kept_answer(folder, 1, "k" * 64)
    return outcome_of(answer and (answer[0].header, answer[0].body), answer is None)  # it is made again


# At the coordinator ---------------------------------------------------------------------------------------------------


def kit_in(folder: Path) -> Kit:
    return Kit(folder, "coordinator", "coordinator", PROJECT)


def deployment_in(folder: Path) -> Deployment:
    return Deployment(folder, "study")


def events_of(folder: Path) -> list[dict[str, Any]]:
    events = list(deployment_in(folder).events())
    return outcome_of(events, any(event.get("what") == "warning" for event in events))


def write_events(folder: Path) -> None:
    deployment_in(folder).folder.mkdir(parents=True)
    for number in range(3):
        deployment_in(folder).record({"what": "round", "round": number})


def deployment_kind(write: Callable[[Deployment], None], read: Callable[[Deployment], Any], file: str) -> Kind:
    return Kind(
        lambda folder: write(deployment_in(folder)), f"deployments/study/{file}", lambda f: read(deployment_in(f))
    )


def note_spending(folder: Path) -> list[str]:
    budget = GivenPrivacy(epsilon=8.0, delta=1e-5, measurement_noise=None, spent=((3.0, 0.1, 40),))
    warnings, _ = noted_spending(folder / "spent.json", {"north": budget})
    return outcome_of(warnings, bool(warnings), "spent.json")


def service_said(folder: Path) -> object:
    status_now = status(kit_in(folder))
    return outcome_of(status_now, "service.json" in status_now.message)


@functools.cache
def authority() -> tuple[rsa.RSAPrivateKey, bytes]:
    key, now = rsa.generate_private_key(65537, 2048), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=9))
    return key, made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def write_authority(folder: Path) -> None:
    key, certificate = authority()
    Authority(certificate, key, {"north": "ab", "south": "cd"}).save(folder, None)


def read_authority(folder: Path) -> object:
    authority = Authority.load(folder, "p", lambda new: None)
    assert authority is not None
    # Other bytes may be the same certificate: PEM ignores some of them.
    return x509.load_pem_x509_certificate(authority.certificate), authority.key.private_numbers(), authority.issued


# Runs and results -----------------------------------------------------------------------------------------------------


def write_pack(folder: Path) -> None:
    run = folder / "demo" / "fedavg" / "D0" / "seed-0"
    write_bytes(run / "result.json", b'{"method": "fedavg", "target": "D0", "seed": 0, "seconds": 3.25}')
    write_bytes(run / "experiment.yaml", b"rounds: 1")
    write_bytes(run / "rounds.jsonl", b'{"round": 1, "losses": {"a": 0.5}}\n')
    packing.pack(folder / "demo")


def read_pack(folder: Path) -> object:
    pack = pack_of(folder / "demo")
    assert pack is not None
    return pack.runs["fedavg/D0/seed-0"], pack.lines("fedavg/D0/seed-0"), pack.order


def site_bytes_of(folder: Path) -> object:
    counted = read_site_bytes(folder)
    return outcome_of(counted, counted is None)  # it is shown to those who watch, and a damaged one is not


def failure_of(folder: Path) -> object:
    failure = read_failure(folder) or ""
    return outcome_of(failure, "failure.json" in failure)


def packed_kind(name: str) -> Kind:
    return Kind(write_pack, f"demo/{name}", read_pack)


KINDS: dict[str, Kind] = {
    "sealing key": Kind(lambda f: SealingKey.of(f / "key"), "key", lambda f: SealingKey.of(f / "key").public),
    "masking key": Kind(lambda f: PrivateKey.of(f / "key"), "key", lambda f: PrivateKey.of(f / "key").public),
    "secret of the noise": Kind(write_ledger, SECRET, lambda f: PrivacyLedger(f, "north", None).secret()),
    "ledger of privacy": Kind(write_ledger, LEDGER, lambda f: PrivacyLedger(f, "north", None).noisy_steps()),
    "audit log": Kind(write_log, "audit.jsonl", lambda f: AuditLog.check(f / "audit.jsonl")),
    "end of the audit log": Kind(write_log, "audit-end.json", lambda f: AuditLog.check(f / "audit.jsonl")),
    "rosters": Kind(write_rosters, ROSTERS, lambda f: Rosters(f, "north", Policy(roster="any")).recorded_sets()),
    "kept upload": Kind(mask_one, "a/1-fit-upload", asked_again),
    "what was masked": Kind(mask_one, "a/1-fit-masked.json", asked_again),
    "who was confirmed": Kind(mask_one, "a/1-fit-confirmed.json", asked_again),
    "what was asked": Kind(mask_one, "a/asked.json", asked_again),
    "keys of other sites": Kind(mask_one, "a/pins.json", asked_again),
    "agreed terms": Kind(write_terms, "agreed.json", lambda f: AgreedTerms(f, "north", Policy()).in_force()),
    "method of sealed models": Kind(write_boxes, "method.json", read_boxes),
    "newest sealed models": Kind(write_boxes, "newest.json", read_boxes),
    "kept answer": Kind(write_answer, "answer-1-kkkkkkkkkkkkkkkk.json", read_answer),
    "body of a kept answer": Kind(write_answer, "answer-1-kkkkkkkkkkkkkkkk.safetensors", read_answer),
    "message": Kind(
        lambda f: write_message(f / "m.safetensors", {"model": MODEL}, {"n": 1}),
        "m.safetensors",
        lambda f: (lambda content, header: (content["model"].equal(MODEL), header))(*read_message(f / "m.safetensors")),  # type: ignore[union-attr]
    ),
    "what is wanted": deployment_kind(
        lambda deployment: deployment.want("run"), lambda deployment: deployment.wanted, "wanted.json"
    ),
    "state": deployment_kind(
        lambda deployment: deployment.set_state("running", request=1), lambda deployment: deployment.state, "state.json"
    ),
    "outcome": deployment_kind(
        lambda deployment: deployment.end("j", "failed", "why", 2),
        lambda deployment: deployment.outcome("j"),
        "outcome.json",
    ),
    "process": deployment_kind(
        lambda deployment: deployment.note_process("j"), lambda deployment: deployment.process_gone("j"), "process.json"
    ),
    "a new job": deployment_kind(
        lambda deployment: deployment.request_new_job("r"),
        lambda deployment: deployment.new_job_requested(),
        "elsewhere.json",
    ),
    "experiment of a deployment": deployment_kind(
        lambda deployment: write_object(deployment.folder / "experiment.json", {"engine": {"tries": 3}}),
        lambda deployment: deployment.engine,
        "experiment.json",
    ),
    "progress": Kind(write_events, "deployments/study/progress.jsonl", events_of),
    "cards": Kind(lambda f: write_object(f / CARDS, {"north": {"samples": 4}}), CARDS, read_cards),
    "what sites spent": Kind(note_spending, "spent.json", note_spending),
    "accepted certificates": Kind(
        lambda f: write_issued(f, {"north": "ab", "south": "cd"}),
        "certificates.json",
        lambda f: revoked_sites(kit_in(f)),
    ),
    "issued certificates": Kind(write_authority, ISSUED, read_authority),
    "certificate of the authority": Kind(write_authority, CERTIFICATE, read_authority),
    "key of the authority": Kind(write_authority, KEY, read_authority),
    "status of a service": Kind(
        lambda f: write_object(f / "service.json", {"pid": 1, "state": "failed", "message": "m"}),
        "service.json",
        service_said,
    ),
    "packed runs": packed_kind("runs.parquet"),
    "packed rounds": packed_kind("rounds.parquet"),
    "digests of packed runs": packed_kind("SHA256SUMS"),
    "order of an experiment": Kind(
        lambda f: write_object(f / "order.json", {"methods": ["fedavg"], "targets": ["a"], "seeds": [0]}),
        "order.json",
        lambda f: read_order(f / "order.json"),
    ),
    "why a run stopped": Kind(lambda f: RunFolder(f, {}).note_failure(ValueError("x")), "failure.json", failure_of),
    "bytes of sites": Kind(
        lambda f: write_site_bytes(f, {"D0": {"up": {"weights": 8}, "down": {}}}), "bytes.json", site_bytes_of
    ),
    "model": Kind(
        lambda f: write_bytes(f / "m.safetensors", model_file(MODEL, {"method": "fedavg"})),
        "m.safetensors",
        lambda f: {name: tensor.tolist() for name, tensor in read_weights(f / "m.safetensors").items()},
    ),
    "kept scores": Kind(
        lambda f: keep_scores(f, "r", KEPT),
        "r.scores",
        lambda f: (lambda kept: None if kept is None else kept_numbers(kept))(kept_scores(f, "r")),
    ),
    "reading that was asked for": Kind(
        lambda f: note_reading(f, "r", "k" * 64), "r-reading.json", lambda f: asked_reading(f, "r")
    ),
    "sums of a target": Kind(
        lambda f: keep_sums(f / "r.json", {"north": SUMS}), "r.json", lambda f: kept_sums(f / "r.json")
    ),
    "threshold of a target": Kind(
        lambda f: write_object(threshold_file(f, "fedavg-D0-0"), {"threshold": 0.25}),
        threshold_file(Path(), "fedavg-D0-0").as_posix(),
        lambda f: read_stored(Threshold, threshold_file(f, "fedavg-D0-0"), "delete it", older=True),
    ),
    "estimates that were made": Kind(lambda f: note_estimated(f, ["r", "s"]), "estimates.json", read_estimated),
}


def flips(whole: bytes, kind: str) -> Iterator[bytes]:
    draws = random.Random(kind)
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        yield bytes(data)


TRIED = [
    pytest.param("sealing key", marks=pytest.mark.case("bit flips", "sealing key")),
    pytest.param("masking key", marks=pytest.mark.case("bit flips", "masking key")),
    pytest.param("secret of the noise", marks=pytest.mark.case("bit flips", "secret of the noise")),
    pytest.param("ledger of privacy", marks=pytest.mark.case("bit flips", "ledger of privacy")),
    pytest.param("audit log", marks=pytest.mark.case("bit flips", "audit log")),
    pytest.param("end of the audit log", marks=pytest.mark.case("bit flips", "end of the audit log")),
    pytest.param("rosters", marks=pytest.mark.case("bit flips", "rosters")),
    pytest.param("kept upload", marks=pytest.mark.case("bit flips", "kept upload")),
    pytest.param("what was masked", marks=pytest.mark.case("bit flips", "what was masked")),
    pytest.param("who was confirmed", marks=pytest.mark.case("bit flips", "who was confirmed")),
    pytest.param("what was asked", marks=pytest.mark.case("bit flips", "what was asked")),
    pytest.param("keys of other sites", marks=pytest.mark.case("bit flips", "keys of other sites")),
    pytest.param("agreed terms", marks=pytest.mark.case("bit flips", "agreed terms")),
    pytest.param("method of sealed models", marks=pytest.mark.case("bit flips", "method of sealed models")),
    pytest.param("newest sealed models", marks=pytest.mark.case("bit flips", "newest sealed models")),
    pytest.param("kept answer", marks=pytest.mark.case("bit flips", "kept answer")),
    pytest.param("body of a kept answer", marks=pytest.mark.case("bit flips", "body of a kept answer")),
    pytest.param("message", marks=pytest.mark.case("bit flips", "message")),
    pytest.param("what is wanted", marks=pytest.mark.case("bit flips", "what is wanted")),
    pytest.param("state", marks=pytest.mark.case("bit flips", "state")),
    pytest.param("outcome", marks=pytest.mark.case("bit flips", "outcome")),
    pytest.param("process", marks=pytest.mark.case("bit flips", "process")),
    pytest.param("a new job", marks=pytest.mark.case("bit flips", "a new job")),
    pytest.param("experiment of a deployment", marks=pytest.mark.case("bit flips", "experiment of a deployment")),
    pytest.param("progress", marks=pytest.mark.case("bit flips", "progress")),
    pytest.param("cards", marks=pytest.mark.case("bit flips", "cards")),
    pytest.param("what sites spent", marks=pytest.mark.case("bit flips", "what sites spent")),
    pytest.param("accepted certificates", marks=pytest.mark.case("bit flips", "accepted certificates")),
    pytest.param("issued certificates", marks=pytest.mark.case("bit flips", "issued certificates")),
    pytest.param("certificate of the authority", marks=pytest.mark.case("bit flips", "certificate of the authority")),
    pytest.param("key of the authority", marks=pytest.mark.case("bit flips", "key of the authority")),
    pytest.param("status of a service", marks=pytest.mark.case("bit flips", "status of a service")),
    pytest.param("packed runs", marks=pytest.mark.case("bit flips", "packed runs")),
    pytest.param("packed rounds", marks=pytest.mark.case("bit flips", "packed rounds")),
    pytest.param("digests of packed runs", marks=pytest.mark.case("bit flips", "digests of packed runs")),
    pytest.param("order of an experiment", marks=pytest.mark.case("bit flips", "order of an experiment")),
    pytest.param("why a run stopped", marks=pytest.mark.case("bit flips", "why a run stopped")),
    pytest.param("bytes of sites", marks=pytest.mark.case("bit flips", "bytes of sites")),
    pytest.param("model", marks=pytest.mark.case("bit flips", "model")),
    pytest.param("kept scores", marks=pytest.mark.case("bit flips", "kept scores")),
    pytest.param("reading that was asked for", marks=pytest.mark.case("bit flips", "reading that was asked for")),
    pytest.param("sums of a target", marks=pytest.mark.case("bit flips", "sums of a target")),
    pytest.param("threshold of a target", marks=pytest.mark.case("bit flips", "threshold of a target")),
    pytest.param("estimates that were made", marks=pytest.mark.case("bit flips", "estimates that were made")),
]
"""`KINDS`, with marks whose texts are literals: the list of tried inputs reads them."""


def test_every_kind_is_tried() -> None:
    assert [case.values[0] for case in TRIED] == list(KINDS)


@pytest.mark.threat("flipped_bit")
@pytest.mark.parametrize("kind", TRIED)
def test_a_flipped_bit_is_noticed_or_changes_nothing(kind: str, tmp_path: Path) -> None:
    write, name, read = KINDS[kind]
    write(tmp_path)
    file = tmp_path / name
    whole, expected = file.read_bytes(), read(tmp_path)
    silent, told_of = 0, set[str]()
    for number, data in enumerate(flips(whole, kind)):
        file.write_bytes(data)
        try:
            content = read(tmp_path)
        except Noticed:
            pass
        except FedshiftError as error:
            told_of.add(str(error))
        else:
            assert content == expected, number
            silent += 1
        file.write_bytes(whole)
    assert all(file.name in text and "\n" not in text for text in told_of)
    assert silent < FLIPS or kind == "digests of packed runs"
    assert read(tmp_path) == expected


WRITERS = ("write_private", "write_message", "write_object", "append_line", "append_event")
CALLS = {
    "data/images": 3,  # tried in tests/data/test_images.py; what is encrypted is, too
    "data/builders/volume_folder": 1,  # tried in tests/data/test_volume_folder.py
    "deploy/agreed_terms": 1,
    "deploy/cli/audit": 1,
    "deploy/cli/deploy": 1,
    "deploy/coordinator": 1,
    "deploy/estimates": 2,
    "deploy/event_log": 1,
    "deploy/flare/certificates": 2,
    "deploy/flare/deployment_folder": 6,
    "deploy/flare/in_project": 2,
    "deploy/flare/provision": 1,
    "deploy/flare/service": 1,
    "deploy/json_files": 3,
    "deploy/playground/selftest": 1,
    "deploy/kept_scores": 2,
    "deploy/privacy/ledger": 2,
    "deploy/remote/outbox": 1,
    "deploy/remote/policy": 2,
    "deploy/remote/secure_federation": 1,
    "deploy/secure/site_sums": 1,
    "deploy/secure/site_seals": 3,
    "deploy/sinks": 1,
    "deploy/site_backup": 1,  # tried in tests/deploy/privacy/test_backup.py
    "deploy/site_cards": 2,
    "deploy/site_requests": 2,
    "evaluation/packing": 1,
    "evaluation/site_bytes": 1,
    "experiment/runs/run_folder": 3,
    "federation/message_files": 1,
    "deploy/crypto/masked_sums": 6,
    "federation/site_memory": 1,
}
"""Module → how many calls it has that write a file with a digest."""


def test_no_kind_of_file_is_forgotten() -> None:
    """Whoever writes another kind adds it to `KINDS`, and its call to `CALLS`."""
    source = Path(fedshift.__file__).parent
    calls = {}
    for file in sorted(source.rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        if number := sum(name in WRITERS for name in called):
            calls[file.relative_to(source).with_suffix("").as_posix()] = number
    assert calls == CALLS
