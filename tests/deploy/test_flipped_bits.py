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
from typing import Any

import numpy as np
import pytest
import torch
from asked import SETTING
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

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
from tried import case

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


Kind = tuple[Callable[[Path], object], str, Callable[[Path], Any]]
"""A kind of file: its writer, where it lies, and its reader, which raises if it is damaged."""


class Noticed(FedshiftError):
    """A reader that raises nothing has told of the damage in its own way, such as a warning."""


def outcome_of(content: Any, damaged: bool, text: str = "") -> Any:
    """What a reader found, unless it told of damage."""
    if damaged:
        raise Noticed(text)
    return content


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
    return Boxes("north", folder, None, None)


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
    return lambda f: write(deployment_in(f)), f"deployments/study/{file}", lambda f: read(deployment_in(f))


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
    return write_pack, f"demo/{name}", read_pack


# fmt: off
KINDS = [
    case("bit flips", "sealing key", lambda f: SealingKey.of(f / "key"), "key",
         lambda f: SealingKey.of(f / "key").public),
    case("bit flips", "masking key", lambda f: PrivateKey.of(f / "key"), "key",
         lambda f: PrivateKey.of(f / "key").public),
    case("bit flips", "secret of the noise", write_ledger, SECRET, lambda f: PrivacyLedger(f, "north", None).secret()),
    case("bit flips", "ledger of privacy", write_ledger, LEDGER,
         lambda f: PrivacyLedger(f, "north", None).noisy_steps()),
    case("bit flips", "audit log", write_log, "audit.jsonl", lambda f: AuditLog.check(f / "audit.jsonl")),
    case("bit flips", "end of the audit log", write_log, "audit-end.json",
         lambda f: AuditLog.check(f / "audit.jsonl")),
    case("bit flips", "rosters", write_rosters, ROSTERS,
         lambda f: Rosters(f, "north", Policy(roster="any")).recorded_sets()),
    case("bit flips", "kept upload", mask_one, "a/1-fit-upload", asked_again),
    case("bit flips", "what was masked", mask_one, "a/1-fit-masked.json", asked_again),
    case("bit flips", "who was confirmed", mask_one, "a/1-fit-confirmed.json", asked_again),
    case("bit flips", "what was asked", mask_one, "a/asked.json", asked_again),
    case("bit flips", "keys of other sites", mask_one, "a/pins.json", asked_again),
    case("bit flips", "agreed terms", write_terms, "agreed.json",
         lambda f: AgreedTerms(f, "north", Policy()).in_force()),
    case("bit flips", "method of sealed models", write_boxes, "method.json", read_boxes),
    case("bit flips", "newest sealed models", write_boxes, "newest.json", read_boxes),
    case("bit flips", "kept answer", write_answer, "answer-1-kkkkkkkkkkkkkkkk.json", read_answer),
    case("bit flips", "body of a kept answer", write_answer, "answer-1-kkkkkkkkkkkkkkkk.safetensors", read_answer),
    case("bit flips", "message", lambda f: write_message(f / "m.safetensors", {"model": MODEL}, {"n": 1}),
         "m.safetensors",
         lambda f: (lambda held, header: (held["model"].equal(MODEL), header))(*read_message(f / "m.safetensors"))),
    case("bit flips", "what is wanted", *deployment_kind(lambda d: d.want("run"), lambda d: d.wanted, "wanted.json")),
    case("bit flips", "state",
         *deployment_kind(lambda d: d.set_state("running", request=1), lambda d: d.state, "state.json")),
    case("bit flips", "outcome",
         *deployment_kind(lambda d: d.end("j", "failed", "why", 2), lambda d: d.outcome("j"), "outcome.json")),
    case("bit flips", "process",
         *deployment_kind(lambda d: d.note_process("j"), lambda d: d.process_gone("j"), "process.json")),
    case("bit flips", "a new job",
         *deployment_kind(lambda d: d.request_new_job("r"), lambda d: d.new_job_requested(), "elsewhere.json")),
    case("bit flips", "experiment of a deployment",
         *deployment_kind(
             lambda d: write_object(d.folder / "experiment.json", {"engine": {"tries": 3}}), lambda d: d.engine,
             "experiment.json")),
    case("bit flips", "progress", write_events, "deployments/study/progress.jsonl", events_of),
    case("bit flips", "cards", lambda f: write_object(f / CARDS, {"north": {"samples": 4}}), CARDS, read_cards),
    case("bit flips", "what sites spent", note_spending, "spent.json", note_spending),
    case("bit flips", "accepted certificates", lambda f: write_issued(f, {"north": "ab", "south": "cd"}),
         "certificates.json", lambda f: revoked_sites(kit_in(f))),
    case("bit flips", "issued certificates", write_authority, ISSUED, read_authority),
    case("bit flips", "certificate of the authority", write_authority, CERTIFICATE, read_authority),
    case("bit flips", "key of the authority", write_authority, KEY, read_authority),
    case("bit flips", "status of a service",
         lambda f: write_object(f / "service.json", {"pid": 1, "state": "failed", "message": "m"}), "service.json",
         service_said),
    case("bit flips", "packed runs", *packed_kind("runs.parquet")),
    case("bit flips", "packed rounds", *packed_kind("rounds.parquet")),
    case("bit flips", "digests of packed runs", *packed_kind("SHA256SUMS")),
    case("bit flips", "order of an experiment",
         lambda f: write_object(f / "order.json", {"methods": ["fedavg"], "targets": ["a"], "seeds": [0]}),
         "order.json", lambda f: read_order(f / "order.json")),
    case("bit flips", "why a run stopped", lambda f: RunFolder(f, {}).note_failure(ValueError("x")), "failure.json",
         failure_of),
    case("bit flips", "bytes of sites", lambda f: write_site_bytes(f, {"D0": {"up": {"weights": 8}, "down": {}}}),
         "bytes.json", site_bytes_of),
    case("bit flips", "model", lambda f: write_bytes(f / "m.safetensors", model_file(MODEL, {"method": "fedavg"})),
         "m.safetensors",
         lambda f: {name: tensor.tolist() for name, tensor in read_weights(f / "m.safetensors").items()}),
    case("bit flips", "kept scores", lambda f: keep_scores(f, "r", KEPT), "r.scores",
         lambda f: (lambda kept: None if kept is None else kept_numbers(kept))(kept_scores(f, "r"))),
    case("bit flips", "reading that was asked for", lambda f: note_reading(f, "r", "k" * 64), "r-reading.json",
         lambda f: asked_reading(f, "r")),
    case("bit flips", "sums of a target", lambda f: keep_sums(f / "r.json", {"north": SUMS}), "r.json",
         lambda f: kept_sums(f / "r.json")),
    case("bit flips", "threshold of a target",
         lambda f: write_object(threshold_file(f, "fedavg-D0-0"), {"threshold": 0.25}),
         threshold_file(Path(), "fedavg-D0-0").as_posix(),
         lambda f: read_stored(Threshold, threshold_file(f, "fedavg-D0-0"), "delete it", older=True)),
    case("bit flips", "estimates that were made", lambda f: note_estimated(f, ["r", "s"]), "estimates.json",
         read_estimated),
]
# fmt: on


def flips(whole: bytes, kind: str) -> Iterator[bytes]:
    draws = random.Random(kind)
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        yield bytes(data)


@pytest.mark.threat("flipped_bit")
@pytest.mark.parametrize(("write", "name", "read"), KINDS)
def test_a_flipped_bit_is_noticed(write: Any, name: str, read: Any, request: Any, tmp_path: Path) -> None:
    title = request.node.get_closest_marker("case").args[1]
    write(tmp_path)
    file = tmp_path / name
    whole, expected = file.read_bytes(), read(tmp_path)
    silent, told_of = 0, set[str]()
    for number, data in enumerate(flips(whole, title)):
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
    assert silent < FLIPS or title == "digests of packed runs"
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
    "deploy/site_backup": 1,  # tried in tests/deploy/privacy/test_ledger.py
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


@pytest.mark.slow
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
