"""``coordinator status``, ``site status`` and ``deploy logs``: how a role is in ten lines, and what to do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from asked import CARD
from calling import Cli
from test_roles import site_file

from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.service import only_service
from fedshift.deploy.remote.policy import AuditLog
from fedshift.json_objects import write_object


@pytest.fixture
def kits(cli: Cli, tmp_path: Path) -> Path:
    file = tmp_path / "project.yaml"
    sites = [word for name in ("north", "south", "east") for word in ("--site", name)]
    assert cli("project", "init", file, *sites, "--server", "localhost", "--contact", "a@example.org").code == 0
    assert cli("project", "provision", file, "--out", tmp_path / "kits", "--no-passphrase").code == 0
    return tmp_path / "kits" / "federation"


def lines_of(out: str) -> dict[str, str]:
    lines = out.splitlines()
    assert 7 <= len(lines) <= 11, out
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


@pytest.mark.case("status", "a coordinator that never ran")
def test_a_coordinator_that_never_ran(cli: Cli, kits: Path) -> None:
    lines = lines_of(cli("coordinator", "status", "--kit", kits / "coordinator").out)
    assert lines["coordinator"].startswith("stopped")
    assert "fedshift coordinator start" in lines["coordinator"]
    assert (lines["deployment"], lines["last refusal or loss"]) == ("none yet", "none")
    assert " GB free at " in lines["disk"]
    assert "nvflare 2." in lines["versions"]
    assert "torch" in lines["versions"]


@pytest.mark.case("status", "a coordinator in a run: sites, round, refusal, budget, last warning")
def test_a_coordinator_in_a_run(cli: Cli, kits: Path) -> None:
    kit = roles.load_kit(kits / "coordinator", "coordinator")
    deployment = Deployment(kit.folder, "study")
    deployment.want("run")
    deployment.set_state("running", request=1)
    deployment.record({"what": "run", "is": "begun", "method": "csac", "target": "east", "seed": 2})
    deployment.record({"what": "round", "method": "csac", "target": "east", "seed": 2, "round": 7, "accuracy": 50.0})
    deployment.record({"what": "fit", "site": "south", "is": "refused", "reason": "rule policy.methods", "round": 8})
    spent = {"epsilon": 8.0, "delta": 1e-5, "measurement_noise": None, "spent": [[2.0, 0.1, 100]]}
    write_object(deployment.folder / "cards.json", {"north": {**CARD, "privacy": spent}, "south": CARD})
    stamp = "2026-11-26 10:00:00"
    (kit.folder / "service.log").write_text(f"{stamp} WARNING the first\n{stamp} ERROR the last\n{stamp} INFO later\n")
    assert cli("project", "revoke", "east", "--kit", kit.folder).code == 0
    with only_service(kit):
        begun = time.mktime((2026, 11, 26, 9, 30, 0, 0, 0, -1))
        status = {"pid": os.getpid(), "state": "connected", "message": "listening on port 8002", "begun": begun}
        write_object(kit.folder / "service.json", {**status, "sites": ["north"]})
        lines = lines_of(cli("coordinator", "status", "--kit", kit.folder).out)
    assert f"process {os.getpid()}) since 2026-11-26 09:30 listening on port 8002" in lines["coordinator"]
    assert (lines["sites connected"], lines["revoked"]) == ("1 of 3: north; not connected: south", "east")
    assert lines["deployment"] == "study running, csac → east, seed 2, round 7 done"
    assert "fit: site south refused: rule policy.methods" in lines["last refusal or loss"]
    assert "north had spent ε = " in lines["privacy"]
    assert "south" not in lines["privacy"]
    assert [text for what, text in lines.items() if what.startswith("last warning of")] == [f"{stamp} ERROR the last"]


@pytest.mark.case("status", "a deployment that failed: how it goes on")
def test_a_deployment_that_failed_says_how_it_goes_on(cli: Cli, kits: Path) -> None:
    deployment = Deployment(kits / "coordinator", "study")
    deployment.want("run")
    deployment.set_state("failed", message="5 jobs ended", request=1)
    lines = lines_of(cli("coordinator", "status", "--kit", kits / "coordinator").out)
    assert lines["deployment"].startswith("study failed: 5 jobs ended")
    assert "fedshift deploy resume study" in lines["deployment"]


@pytest.mark.case("status", "a site: last request, last refusal, budget")
def test_a_site(cli: Cli, kits: Path) -> None:
    privacy = {"epsilon": 4, "delta": 1e-5}
    file = site_file(kits, privacy=privacy)
    lines = lines_of(cli("site", "status", file).out)
    assert lines["site north"].startswith("stopped")
    assert "fedshift site start" in lines["site north"]
    assert (lines["last request"], lines["last refusal"]) == ("none yet", "none")
    assert lines["privacy"].endswith("of 4 spent at δ = 1e-05")
    log = AuditLog(file.parent / "memory" / "audit.jsonl")
    log.append(do="call", call="fit", run="study", round=3, refused="site 'north' refuses (rule policy.send)")
    log.append(do="call", call="fit", run="study", round=4)
    lines = lines_of(cli("site", "status", file).out)
    assert lines["last request"].endswith("fit of study, round 4")
    assert lines["last refusal"].endswith("fit of study, round 3: site 'north' refuses (rule policy.send)")


@pytest.mark.case("status", "a site whose audit log was changed")
def test_a_site_whose_log_was_changed(cli: Cli, kits: Path) -> None:
    file = site_file(kits)
    log = AuditLog(file.parent / "memory" / "audit.jsonl")
    for number in (1, 2):
        log.append(do="call", call="fit", run="study", round=number)
    log.path.write_text(log.path.read_text().replace('"round": 1', '"round": 7'))
    output = cli("site", "status", file)
    assert output.code == 0
    assert "warning" in output.out
    assert "line 1" in output.out


@pytest.mark.case("status", "a service's status that somebody else wrote: ESC, no numbers")
def test_what_a_file_says_harms_no_terminal(cli: Cli, kits: Path) -> None:
    kit = roles.load_kit(kits / "coordinator", "coordinator")
    with only_service(kit):
        status = {"pid": os.getpid(), "state": "connected", "message": "a\x1b[2Jb\nc", "begun": 1e300, "sites": 3}
        write_object(kit.folder / "service.json", status)
        out = cli("coordinator", "status", "--kit", kit.folder)
    assert out.code == 0
    assert "\x1b" not in out.out
    assert "an unknown time" in out.out


@pytest.mark.case("logs", "deploy logs: severity, and what to do")
def test_logs_of_a_deployment_say_how_severe_and_what_to_do(cli: Cli, kits: Path) -> None:
    deployment = Deployment(kits / "coordinator", "study")
    deployment.want("run")
    deployment.record({"what": "round", "round": 1})
    deployment.record({"what": "fit", "site": "north", "is": "lost", "reason": "no reply within 5 s"})
    deployment.record({"what": "fit", "site": "south", "is": "refused", "reason": "rule policy.send"})
    deployment.record({"what": "job", "is": "died", "job": "1", "status": "KILLED"})
    deployment.record({"what": "job", "is": "failed", "reason": "MemoryError()"})
    lines = cli("deploy", "logs", "study", "--kit", kits / "coordinator").out.splitlines()
    assert [line.split()[2] for line in lines] == ["INFO", "WARNING", "WARNING", "WARNING", "ERROR"]
    assert "site status" in lines[1]
    assert "policy.send" in lines[2]
    assert "by itself" in lines[3]
    assert "deploy resume" in lines[4]
