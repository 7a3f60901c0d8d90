"""A second pair of eyes: what needs two people is agreed to by two, and by nobody who comes twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from loopback import request
from pydantic import ValidationError
from test_agreed_terms import ask, widths
from test_hostile_coordinator import hello, program_of

from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.approvals import Approver, public_key, same_person
from fedshift.deploy.cli.site import agree_site
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.errors import Refused, UserError


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
    assert len(terms.agree(terms.requests(), Approver("Ben"))) == 2
    assert ask(terms, 4) == ""


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
def site(keys: Path, tmp_path: Path) -> tuple[AgreedTerms, Path]:
    """A site whose file lists the keys of two people, and its SITE.yaml."""
    approvers = {name: keys.joinpath(f"{name}.pub").read_text() for name in ("ana", "ben")}
    program = program_of(tmp_path, approvals=2, approvers=approvers)
    assert ask(program.terms, 4)
    return program.terms, program.config.path


def test_two_people_sign_with_their_keys(site: tuple[AgreedTerms, Path], keys: Path, capsys: Any) -> None:
    terms, path = site
    for wrong, message in (
        ({}, "--as NAME"),
        ({"name": "anna"}, "did you mean 'ana'"),
        ({"name": "ana"}, "--key FILE"),
        ({"name": "ana", "key": keys / "eve"}, "not the key"),
        ({"name": "ana", "key": keys / "ana.pub"}, "no private key"),
        ({"name": "ana", "key": keys / "absent"}, "cannot read"),
    ):
        with pytest.raises(UserError, match=message) as error:
            agree_site(path, yes=True, **wrong)
        assert "\n" not in str(error.value)
    for _ in range(2):
        agree_site(path, yes=True, name="ana", key=keys / "ana")
        assert "once another person agreed" in capsys.readouterr().out
    assert ask(terms, 4)
    agree_site(path, yes=True, name="Ben", key=keys / "ben")
    assert ask(terms, 4) == ""
    (line,) = [entry for entry in AuditLog.check(path.parent / "memory" / "audit.jsonl")[0] if entry["do"] == "agree"]
    assert line["people"] == ["ana", "ben"]


@pytest.mark.threat("other_terms")
def test_a_signature_that_somebody_wrote_into_the_file_does_not_count(
    site: tuple[AgreedTerms, Path], keys: Path
) -> None:
    terms, path = site
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
