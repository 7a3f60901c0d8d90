"""``fedshift security``: the promises tried on a federation of processes, and what the command says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import Cli

from fedshift import trust
from fedshift.deploy.playground import selftest as module
from fedshift.deploy.playground.selftest import Broken, Promise
from fedshift.encryption import KEY_FILE, present_key

ALLOW = trust.allow


@pytest.mark.threat("certificate", "flare_rights")
@pytest.mark.slow
def test_every_promise_holds(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "allow", ALLOW)  # other tests trust their own code
    output = cli("security", "selftest", "--keep", tmp_path)
    *lines, last = output.out.splitlines()
    held = len(module.PROMISES)
    assert ([line for line in lines if not line.startswith("holds")], last) == ([], f"{held} of {held} hold")
    assert (output.code, len(lines)) == (0, len(module.PROMISES))


def test_a_promise_that_does_not_hold_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> str:
        raise Broken("the door\x1b[2J was open")

    def breaks(_: Any) -> str:
        raise KeyError("no such thing")

    @contextlib.contextmanager
    def nothing(_: Path) -> Iterator[None]:
        yield

    promises = [Promise("somebody", how.__name__, how) for how in (fails, breaks, lambda _: "it was shut")]
    monkeypatch.setattr(module, "PROMISES", promises)
    monkeypatch.setattr(module, "playing", nothing)
    output = cli("security", "selftest")
    assert output.code == 1
    assert [line.split()[0] for line in output.out.splitlines()] == ["BROKEN", "BROKEN", "holds", "1"]
    assert "1 of 3 hold" in output.out
    assert "the door [2J was open" in output.out
    assert "could not be tried: KeyError" in output.out


def test_promises_differ() -> None:
    named = [(promise.who, promise.tries) for promise in module.PROMISES]
    assert len(named) == len(set(named)) >= 10


def test_a_key_is_made_once(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys" / "key"
    assert KEY_FILE in cli("security", "key", file).out
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(KEY_FILE, str(file))
    assert present_key() is not None
    assert "exists" in cli("security", "key", file).error()


def test_logs_are_exported_and_verified(cli: Cli, tmp_path: Path) -> None:
    from fedshift.deploy.flare.deployment_folder import Deployment
    from fedshift.deploy.remote.policy import AuditLog

    file, out = tmp_path / "project.yaml", tmp_path / "export"
    contact = ("--server", "localhost", "--contact", "a@example.org")
    assert cli("project", "init", file, "--site", "north", *contact).code == 0
    assert cli("project", "provision", file, "--no-passphrase", "--out", tmp_path).code == 0
    north, coordinator = (tmp_path / "federation" / folder for folder in ("sites/north", "coordinator"))
    log = AuditLog(north / "memory" / "audit.jsonl")
    for number in range(3):
        log.append(do="call", round=number)
    Deployment(coordinator, "study").want("run")
    Deployment(coordinator, "study").record({"what": "experiment", "is": "begun"})
    authority = ("--authority", coordinator / "flare" / "startup" / "rootCA.pem")
    assert "3 lines" in cli("security", "export", north / "SITE.yaml", "--out", out).out
    assert "'audit' of site 'north'" in cli("security", "verify", out, *authority).out
    log.path.write_text(log.path.read_text().replace('"round": 1', '"round": 5'))
    output = cli("security", "verify", out, *authority, "--log", log.path)
    assert (output.code, "line 2 was changed" in output.err) == (1, True)
    assert "1 line" in cli("security", "export", "study", "--out", out, "--kit", coordinator).out
    assert "'study' of coordinator 'localhost'" in cli("security", "verify", out, *authority).out
    assert "did you mean 'study'" in cli("security", "export", "stduy", "--out", out, "--kit", coordinator).error()
