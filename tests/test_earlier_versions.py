"""Files that versions before digests wrote: read where a project needs them, and damage to newer files stays damage."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from fedshift.deploy.agreed_terms import TERMS, AgreedTerms, Peer, SplitTerm
from fedshift.deploy.chained_log import START, append_line, checked_lines
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.deploy.secure.site_sums import Rosters
from fedshift.digests import Damaged
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError
from fedshift.json_objects import read_object, write_object


def older_log(path: Path, entries: int) -> None:
    """Lines that have the digest of the line before, and none of their own."""
    last, lines = START, []
    for number in range(entries):
        lines.append(json.dumps({"number": number, "previous": last}))
        last = hashlib.sha256(lines[-1].encode()).hexdigest()
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.case("files of earlier versions", "a log of before is checked and written on")
@pytest.mark.case("files of earlier versions", "a log of before with a changed, a missing or a moved line")
def test_a_log_of_before_is_written_on(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    older_log(log, 3)
    append_line(log, {"number": 3})
    assert [json.loads(line)["number"] for line in checked_lines(log)] == [0, 1, 2, 3]
    lines = log.read_text().splitlines()
    for spoiled in (
        [lines[0].replace('"number": 0', '"number": 7'), *lines[1:]],
        [*lines[:2], lines[3]],
        [lines[1], lines[0], *lines[2:]],
    ):
        log.write_text("".join(f"{line}\n" for line in spoiled))
        with pytest.raises(FedshiftError, match="the log was changed here"):
            checked_lines(log)


@pytest.mark.slow
@pytest.mark.case("bit flips", "every bit of a log's last line that follows lines of an earlier version")
def test_no_flip_makes_an_older_line_of_a_newer_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    older_log(log, 1)
    append_line(log, {"number": 1})
    whole = log.read_bytes()
    begin = whole.index(b"\n") + 1
    for place in range(8 * begin, 8 * len(whole) - 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        log.write_bytes(bytes(damaged))
        with pytest.raises(FedshiftError):
            checked_lines(log)


@pytest.mark.case(
    "files of earlier versions", "where an audit log ended, without a digest: it still may not be shorter"
)
def test_an_audit_log_of_before_may_not_be_shorter(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    older_log(log, 3)
    last = hashlib.sha256(log.read_text().splitlines()[-1].encode()).hexdigest()
    (tmp_path / "audit-end.json").write_text(json.dumps({"size": log.stat().st_size, "last": last, "ledger": 0}))
    assert len(AuditLog.check(log)[0]) == 3
    older_log(log, 2)
    with pytest.raises(FedshiftError, match="lines were cut off"):
        AuditLog.check(log)


@pytest.mark.case(
    "files of earlier versions", "objects without a digest; a digest whose name is damaged is none of them"
)
def test_objects_without_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text('{"state": "finished", "request": 2}')
    assert read_object(file, older=True) == {"state": "finished", "request": 2}
    with pytest.raises(Damaged):
        read_object(file)
    write_object(file, {"state": "finished"})
    whole = file.read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(bytes(damaged))
        try:
            assert read_object(file, older=True) == {"state": "finished"}
        except Damaged:
            continue
    for text in ("[]", '"text"', "3", '["_sha257"]'):
        file.write_text(text)
        with pytest.raises(Damaged):
            read_object(file, older=True)


@pytest.mark.case("files of earlier versions", "a deployment's state, request and outcome")
def test_a_deployment_of_before_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "deployments" / "study"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"state": "finished", "request": 1}')
    (folder / "wanted.json").write_text('{"want": "run", "request": 1}')
    (folder / "outcome.json").write_text('{"job": "j", "outcome": "finished"}')
    found = Deployment(tmp_path, "study")
    assert found.ended
    assert found.outcome("j")["outcome"] == "finished"


@pytest.mark.case("files of earlier versions", "the secret of the noise without a digest; another length is damage")
def test_a_secret_of_before_is_read(tmp_path: Path) -> None:
    file, secret = tmp_path / "secret", os.urandom(32)
    file.write_bytes(secret)
    assert read_private(file, older=32) == secret
    with pytest.raises(Damaged):
        read_private(file)
    write_private(file, secret)
    file.write_bytes(file.read_bytes().replace(b"fedshift", b"gedshift"))
    with pytest.raises(Damaged):
        read_private(file, older=32)


@pytest.mark.case("files of earlier versions", "what a site agreed to, kind by kind, and what waits for a person")
def test_agreements_of_before_hold(tmp_path: Path) -> None:
    split, peer = {"test_fraction": 0.4, "split": "auto", "seed": 0}, {"site": "east", "certificate": "34"}
    before = {
        "models": {"agreed": [{"name": "linear"}], "asked": [{"name": "mlp"}]},
        "splits": {"agreed": [split], "asked": [{**split, "seed": 1}]},
        "peers": {"agreed": [peer], "asked": []},
    }
    file = tmp_path / TERMS
    file.write_text(json.dumps(before))
    terms = AgreedTerms(tmp_path, "north", Policy())
    assert terms.in_force().models == ({"name": "linear"},)
    assert terms.in_force().splits == (SplitTerm(**split),)
    assert terms.in_force().peers == (Peer(**peer),)
    assert [(request.number, request.times) for request in terms.requests()] == [(2, 1), (1, 1)]
    terms.check_peers({"east": "34"})
    with pytest.raises(FedshiftError, match="has not agreed to the certificate of 'east'"):
        terms.check_peers({"east": "other"})
    terms.agree(terms.requests()[1:2])
    assert AgreedTerms(tmp_path, "north", Policy()).in_force().splits[-1].seed in (0, 1)
    assert "_sha256" in json.loads(file.read_text())
    for spoiled in ({**before, "peers": {"agreed": [{"site": "east"}]}}, {**before, "more": {}}):
        file.write_text(json.dumps(spoiled))
        with pytest.raises(Damaged, match="restore it, or remove it to agree anew"):
            terms.in_force()


@pytest.mark.case("files of earlier versions", "sums that were masked before the sets of sites were recorded")
def test_sums_of_before_bind_a_site(tmp_path: Path) -> None:
    """Else a coordinator that asked for a sum before the upgrade asks for a like one of other sites after it."""
    log, last = tmp_path / "audit.jsonl", START
    with open(log, "w") as file:
        for roster in (["east", "north", "west"], ["east", "north", "south"], None):
            line = json.dumps({"time": 1.0, "do": "call", **({"roster": roster} if roster else {}), "previous": last})
            last = hashlib.sha256(line.encode()).hexdigest()
            file.write(f"{line}\n")
    rosters = Rosters(tmp_path, "north", Policy(), AuditLog(log))
    with pytest.raises(FedshiftError, match="takes part in sums of east, north, south, and not"):
        rosters.check(["east", "north", "south", "west"])
    assert rosters.note(["east", "north", "south"], "run") == 1
    Rosters(tmp_path, "north", Policy(roster="any"), AuditLog(log)).check(["east", "north", "south", "west"])
    AuditLog(log).append(do="call", roster=["a", "b", "c"], noise=True)
    assert AuditLog(log).older_roster == ["east", "north", "south"]
