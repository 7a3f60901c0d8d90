"""What a site agrees to: one request after another, who asked and when, and bounds of how it trains."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from asked import SETTING, request
from outcomes import one_line
from pydantic import ValidationError
from test_hostile_coordinator import hello, program_of
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.deploy.agreed_terms import AgreedTerms, Peer, Terms
from fedshift.deploy.approvals import Approver, public_key, same_person
from fedshift.deploy.cli.site import agree_site
from fedshift.deploy.remote.policy import AuditLog, Policy, TrainingBounds
from fedshift.errors import Refused, UserError
from fedshift.json_objects import write_object
from fedshift.models import registry as models
from tried import case


def wide(width: int) -> Any:
    return models.parse({"name": "mlp", "hidden": [width]})


def terms_of(folder: Path, **policy: Any) -> AgreedTerms:
    return AgreedTerms(folder, "north", Policy(**policy))


def ask(terms: AgreedTerms, width: int, run: str = "study", coordinator: str = "fl.example.org") -> str:
    """What the site says to a network; empty if it agreed."""
    try:
        with terms.asked_by(coordinator, run):
            terms.check(network=wide(width), agree=True)
    except Refused as error:
        return str(error)
    return ""


def widths(requests: Any) -> list[int]:
    return [term["hidden"][0] for request in requests for term in request.lacks.models]


@pytest.fixture
def site(tmp_path: Path) -> tuple[AgreedTerms, Path]:
    """The terms of a site that has agreed to a network of width 1, and its SITE.yaml."""
    program = program_of(tmp_path)
    assert ask(program.terms, 1) == ""
    return program.terms, program.config.path


@pytest.mark.threat("other_terms")
@pytest.mark.case("requests to agree", "a flood of 30 requests after an honest one, which is asked again")
def test_a_flood_drops_the_oldest_and_an_honest_request_is_the_newest_again(site: tuple[AgreedTerms, Path]) -> None:
    terms, _ = site
    assert "policy.models" in ask(terms, 8)
    for width in range(1000, 1030):
        ask(terms, width, run="flood")
    assert ask(terms, 8, run="honest")
    waiting = terms.requests()
    assert (len(waiting), widths(waiting)[0], waiting[0].run) == (20, 8, "honest")
    assert widths(waiting)[1:] == list(range(1029, 1010, -1))
    assert len({request.number for request in waiting}) == 20


@pytest.mark.case("requests to agree", "one of several is agreed to by its number, which stays the same meanwhile")
def test_requests_are_chosen_by_number(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    for width in (4, 5, 6):
        ask(terms, width)
    number = terms.requests()[1].number
    ask(terms, 7)  # a request that comes since moves no number
    agree_site(path, yes=True, only=[number])
    assert (widths(terms.requests()), ask(terms, 5)) == ([7, 6, 4], "")
    assert ask(terms, 4)
    with pytest.raises(UserError, match="--only 99"):
        agree_site(path, yes=True, only=[99])
    with pytest.raises(UserError, match="--refuse"):
        agree_site(path, yes=True, refuse=True)


@pytest.mark.case("requests to agree", "what was refused comes again at each deployment, alone and beside other terms")
def test_what_was_refused_is_not_asked_again(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)
    other = {"network": {"name": "mlp", "hidden": [4]}}
    assert "site agree" in request(program, do="hello", **hello(**other))["message"]
    agree_site(program.config.path, refuse=True)
    assert program.terms.requests() == ()
    for changes in (other, {**other, "seeds": [0, 7]}):
        assert "has refused" in request(program, do="hello", **hello(**changes))["message"]
    (waiting,) = program.terms.requests()  # of the second, what nobody decided about
    assert (waiting.lacks.models, [split.seed for split in waiting.lacks.splits]) == ((), [7])
    (refused,) = program.terms.refusals()
    agree_site(program.config.path, yes=True, only=[refused.number])  # minds change
    assert program.terms.refusals() == ()
    message = request(program, do="hello", **hello(**other, seeds=[0, 7]))["message"]
    assert "has refused" not in message
    assert "policy.splits" in message


@pytest.mark.case("requests to agree", "a person is shown who asked, when, for which run, and for what")
@pytest.mark.parametrize(
    ("typed", "agreed", "refused"),
    [("a\nr\nl\n", [6], [5]), ("r\na\n", [5], [6]), ("l\nl\nl\n", [], []), ("x\n\na\n", [4], []), ("", [], [])],
)
def test_a_person_decides_about_one_request_after_another(
    typed: str, agreed: list[int], refused: list[int], site: tuple[AgreedTerms, Path]
) -> None:
    terms, path = site
    for width in (4, 5, 6):
        ask(terms, width, run=f"study-{width}")
    shown = CliRunner().invoke(app, ["site", "agree", str(path)], input=typed)
    assert "fl.example.org for study-6" in shown.output
    assert "hidden [6]" in shown.output
    assert [network["hidden"][0] for network in terms.in_force().models][1:] == agreed
    assert widths(terms.refusals()) == refused
    assert set(widths(terms.requests())) == {4, 5, 6} - {*agreed, *refused}


@pytest.mark.case("requests to agree", "certificates of other sites stand apart from networks")
def test_peers_stand_apart_from_networks(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    terms.check_peers({"south": "a" * 64})
    ask(terms, 4)
    with pytest.raises(Refused, match=r"policy\.peers"):
        terms.check_peers({"south": "b" * 64})
    peers, network = terms.requests()
    assert (peers.lacks.models, network.lacks.peers) == ((), ())
    agree_site(path, yes=True, only=[network.number])
    assert terms.in_force().peers == (Peer(site="south", certificate="a" * 64),)
    agree_site(path, yes=True)
    assert terms.in_force().peers == (Peer(site="south", certificate="b" * 64),)


@pytest.mark.case("requests to agree", "one answer names network, splits and training options that are not agreed to")
def test_one_answer_names_all_that_is_missing(tmp_path: Path) -> None:
    program = program_of(tmp_path, training="first", smallest_group=1000)
    message = request(program, do="hello", **hello(network={"name": "linear"}, seeds=list(range(9))))["message"]
    assert "policy.smallest_group" in message
    assert "policy.splits" in message
    program = program_of(tmp_path / "other", training="first")
    assert "error" not in request(program)
    changes: dict[str, Any] = {
        "network": {"name": "mlp", "hidden": [4]},
        "seeds": [8],
        "training": {**SETTING["training"], "lr": 0.2},
    }
    message = request(program, do="hello", **hello(**changes))["message"]
    assert all(rule in message for rule in ("policy.models", "policy.splits", "policy.training"))
    (waiting,) = program.terms.requests()
    assert waiting.lacks.models
    assert waiting.lacks.splits
    assert waiting.lacks.training
    assert program.terms.in_force().splits  # of the first request; a hello that is refused agrees to nothing
    assert "error" not in request(program)


BOUNDS = {"lr": 0.1, "batch_size": 8, "rounds": 3, "mini_batches": 40, "local_epochs": 2}


@pytest.mark.threat("other_terms")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        case("bounds of training", "just within all of them", {}, None),
        case("bounds of training", "a rate of 10,000", {"lr": 1e4}, "lr"),
        case("bounds of training", "batches of one", {"batch_size": 1}, "batch_size"),
        case("bounds of training", "a round more", {"rounds": 4}, "rounds"),
        case("bounds of training", "layer_rates", {"layer_rates": {"features": 1000}}, "lr"),
        case(
            "bounds of training",
            "a later round than the options say",
            {"envelope": {"exchange": 1, "round": 9, "progress": 0.0, "mini_batches_left": 5}},
            "rounds",
        ),
        case(
            "bounds of training",
            "more mini-batches than allowed",
            {"envelope": {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 41}},
            "mini_batches",
        ),
        case(
            "bounds of training",
            "more passes over the data",
            {"method": {"name": "fedavg", "options": {"local_epochs": 3}}},
            "local_epochs",
        ),
    ],
)
@pytest.mark.parametrize("rule", ["bounds", "first"])
def test_training_is_bound(rule: str, changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    """By numbers in SITE.yaml, or by the first experiment that was answered."""
    program = program_of(tmp_path, training=BOUNDS if rule == "bounds" else "first")
    plain = {**SETTING["training"], "lr": 0.1, "batch_size": 8, "rounds": 3}
    setting = {**SETTING, "training": plain, "method": {"name": "fedavg", "options": {"local_epochs": 2}}}
    envelope = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 40}
    if rule == "first":
        assert "error" not in request(program, setting=setting, envelope=envelope)
    asked = dict(changes)
    envelope = asked.pop("envelope", envelope)
    setting |= {"method": asked.pop("method", setting["method"])}
    answer = request(program, setting={**setting, "training": {**plain, **asked}}, envelope=envelope, run="other")
    if message is None:
        assert "error" not in answer, answer
        return
    assert "policy.training" in answer["message"]
    if rule == "bounds":
        assert f"{message} " in answer["message"]
        assert program.terms.requests() == ()
    else:
        (waiting,) = program.terms.requests()
        assert getattr(waiting.lacks.training[0], message) != BOUNDS[message]
        agree_site(program.config.path, yes=True)
        again = request(program, setting={**setting, "training": {**plain, **asked}}, envelope=envelope, run="third")
        assert "policy.training" not in again.get("message", "")


@pytest.mark.case("bounds of training", "none, as in every SITE.yaml of before")
def test_without_the_rule_nothing_is_bound(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)
    training = {**SETTING["training"], "lr": 1e-6, "batch_size": 1}
    assert "error" not in request(program, setting={**SETTING, "training": training}, run="other")
    assert program.terms.in_force().training == ()
    assert not TrainingBounds(lr=1.0).beyond(TrainingBounds())


@pytest.mark.parametrize(
    "content",
    [
        case("stored agreements", "a number for a list", {"models": 3}),
        case("stored agreements", "a list", "[]"),
        case("stored agreements", "an empty file", ""),
        case("stored agreements", "text for networks", {"agreed": {"models": "all"}}),
        case("stored agreements", "an unknown field", {"agreed": {}, "all": True}),
        case("stored agreements", "a negative bound", {"agreed": {"training": [{"lr": -1}]}}),
        case("stored agreements", "a damaged name of its digest", '{"agreed": {}, "_sha257": ""}'),
    ],
)
def test_a_damaged_file_agrees_to_nothing(content: str | dict[str, Any], tmp_path: Path) -> None:
    if isinstance(content, str):
        (tmp_path / "agreed.json").write_text(content)
    else:
        write_object(tmp_path / "agreed.json", content)
    with pytest.raises(UserError, match=r"agreed\.json"):
        terms_of(tmp_path).check(network=wide(4), agree=True)


@pytest.mark.case("requests to agree", "names of a coordinator with 10,000 characters and control sequences")
def test_names_of_strangers_are_bound(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    ask(terms, 4, run="x" * 10_000, coordinator="\x1b[31m" + "y" * 10_000)
    (waiting,) = terms.requests()
    assert len(waiting.run) == len(waiting.coordinator) == 200
    assert "\x1b" not in CliRunner().invoke(app, ["site", "agree", str(path)], input="l\n").output


def test_terms_add_up() -> None:
    old, new = (Terms(peers=(Peer(site="south", certificate=name),)) for name in "ab")
    assert old.with_terms(new) == new
    assert not old.without(old)


def two_people(folder: Path, **policy: Any) -> AgreedTerms:
    return AgreedTerms(folder, "north", Policy(approvals=2, **policy))


def test_nothing_is_agreed_to_as_the_first(tmp_path: Path) -> None:
    program = program_of(tmp_path, approvals=2, training="first")
    message = request(program, do="hello", **hello())["message"]
    assert "2 people there may" in message
    (waiting,) = program.terms.requests()
    assert waiting.lacks.splits
    assert not program.terms.in_force()


@pytest.mark.threat("other_terms")
@pytest.mark.parametrize("second", ["Ana", "ana", " ANA ", "\uff21na", "Ana  "])
def test_one_name_twice_is_one_person(second: str, tmp_path: Path) -> None:
    terms = two_people(tmp_path)
    assert ask(terms, 4)
    assert terms.agree(terms.requests(), Approver("Ana")) == ("Ana",)
    assert len(terms.agree(terms.requests(), Approver(second))) == 1
    assert ask(terms, 4)  # asked again, which keeps what was approved
    assert (len(terms.agree(terms.requests(), Approver("Ben"))), ask(terms, 4)) == (2, "")


def test_an_approval_is_of_one_request_as_it_was_shown(tmp_path: Path) -> None:
    terms = two_people(tmp_path)
    ask(terms, 4)
    ask(terms, 5)
    five, four = terms.requests()
    terms.agree([four], Approver("Ana"))
    terms.agree([five], Approver("Ben"))
    assert widths(terms.requests()) == [5, 4]
    assert [terms.approvals(request) for request in terms.requests()] == [("Ben",), ("Ana",)]
    other = terms.requests()[1].model_copy(update={"lacks": five.lacks})
    assert terms.approvals(other) == ()
    terms.refuse([terms.requests()[1]])  # one person is enough for a no, and it ends what was approved
    terms.agree([terms.refusals()[0]], Approver("Ben"))
    assert "has refused" in ask(terms, 4)
    with pytest.raises(Refused, match="rule policy"):
        terms.agree(terms.requests())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private keys of three people, and public ones beside them, as OpenSSH's own program writes them."""
    pytest.importorskip("cryptography", reason="cryptography is not installed: pip install -e '.[deploy]'")
    program, folder = shutil.which("ssh-keygen"), tmp_path_factory.mktemp("keys")
    for name in ("ana", "ben", "eve"):
        if program is not None:
            subprocess.run([program, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        else:
            _write_key(folder / name)
    return folder


def _write_key(file: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    file.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()))
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    file.with_suffix(".pub").write_bytes(public + f" {file.name}@example\n".encode())


@pytest.fixture
def signing_site(keys: Path, tmp_path: Path) -> tuple[AgreedTerms, Path]:
    """A signing_site whose file lists the keys of two people, and its SITE.yaml."""
    approvers = {name: keys.joinpath(f"{name}.pub").read_text() for name in ("ana", "ben")}
    program = program_of(tmp_path, approvals=2, approvers=approvers)
    assert ask(program.terms, 4)
    return program.terms, program.config.path


def test_two_people_sign_with_their_keys(signing_site: tuple[AgreedTerms, Path], keys: Path, capsys: Any) -> None:
    terms, path = signing_site
    for wrong, message in (
        ({}, "--as NAME"),
        ({"name": "anna"}, "did you mean 'ana'"),
        ({"name": "ana"}, "--key FILE"),
        ({"name": "ana", "key": keys / "eve"}, "not the key"),
        ({"name": "ana", "key": keys / "ana.pub"}, "no private key"),
        ({"name": "ana", "key": keys / "absent"}, "cannot read"),
    ):
        with one_line(message):
            agree_site(path, yes=True, **wrong)
    for _ in range(2):
        agree_site(path, yes=True, name="ana", key=keys / "ana")
        assert "once another person agreed" in capsys.readouterr().out
    assert ask(terms, 4)
    agree_site(path, yes=True, name="Ben", key=keys / "ben")
    assert ask(terms, 4) == ""
    (line,) = [entry for entry in AuditLog.check(path.parent / "memory" / "audit.jsonl")[0] if entry["do"] == "agree"]
    assert line["people"] == ["ana", "ben"]


@pytest.mark.threat("other_terms")
def test_a_signature_written_into_the_file_does_not_count(signing_site: tuple[AgreedTerms, Path], keys: Path) -> None:
    terms, path = signing_site
    agree_site(path, yes=True, name="ana", key=keys / "ana")
    (waiting,) = terms.requests()
    (approval,) = waiting.approvals
    for forged in (
        approval.model_copy(update={"person": "ben"}),
        approval.model_copy(update={"person": "ben", "signature": ""}),
        approval.model_copy(update={"person": "eve"}),
    ):
        assert terms.approvals(waiting.model_copy(update={"approvals": (approval, forged)})) == ("ana",)


def test_mistakes_in_the_list_of_people_are_one_line(keys: Path) -> None:
    ana, ben = (keys.joinpath(f"{name}.pub").read_text() for name in ("ana", "ben"))
    for wrong, message in (
        ({"ana": ana}, "lists 1 of the 2 people"),
        ({"ana": ana, "Ana": ben}, "same name"),
        ({"ana": ana, "ben": ana}, "same key"),
        ({"ana": ana, "ben": "ssh-rsa AAAA"}, "'ben' is not a public key"),
    ):
        with pytest.raises(ValidationError, match=message):
            Policy(approvals=2, approvers=wrong)
    assert public_key(ana) == " ".join(ana.split()[:2])
    assert same_person("Ana") != same_person("Anna")
