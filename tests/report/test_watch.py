"""The page that watches runs: what it says of their files, and that only this machine can read it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_tables import read

from fedshift.deploy.json_files import append_event
from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord
from fedshift.evaluation.site_bytes import write_site_bytes
from fedshift.json_objects import write_object
from fedshift.report.sections.blocks import Listing
from fedshift.report.watch.live_page import (
    Deployed,
    SeenSite,
    Watched,
    WatchedRun,
    _blocks,
    experiments_in,
    server,
    watch_page,
)

Write = Callable[..., Path]


@pytest.fixture
def running(write_part: Write) -> Path:
    """One run is finished, one is in its second round of eight, one failed, and one has not begun. 2 s a run."""
    write_part("fedavg", "a", 0, 70.0, 80.0, warnings=["odd <columns>"])
    for target in ("b", "c"):
        folder = write_part("fedavg", target, 0, 30.0, 41.5)
        (folder / "result.json").unlink()
        (folder / "experiment.yaml").write_text("training: {rounds: 8}")
    write_object(folder / "failure.json", {"reason": "site 'x' sent NaN"})
    lines = (folder.parents[1] / "b" / "seed-0" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[1]) | {"extra": {"missing": {"north": "no answer in <60> s"}}}
    text = "\n".join([lines[0], json.dumps(last), '{"round": 3, "target_acc'])
    (folder.parents[1] / "b" / "seed-0" / "rounds.jsonl").write_text(text)
    experiment = folder.parents[2]
    plan = {"methods": ["fedavg"], "targets": ["a", "b", "c", "d"], "seeds": [0]}
    write_object(experiment / "order.json", plan)
    return experiment.parent


def test_what_runs_have_done_and_will_do(running: Path) -> None:
    (one,) = experiments_in(running)
    assert (one.name, one.planned, one.deployment) == ("exp", 4, None)
    by_target = {run.names[1]: run for run in one.runs}
    assert [record.round for record in by_target["b"].rounds] == [1, 2], "a line that is being written does not count"
    assert by_target["b"].missing == {"north": "no answer in <60> s"}
    assert by_target["b"].planned_rounds == 8
    assert "NaN" in by_target["c"].failure
    assert one.seconds_left == 4.0, "three of four runs of 2 s are left, and 2 s of them are done"
    run = running / "exp" / "fedavg" / "b"
    settings = "training: {rounds: 8, mini_batches: {x: 120, y: 80}}"
    (run / "seed-0" / "experiment.yaml").write_text(settings)
    (one,) = experiments_in(running)
    pace = {record.round: record.mini_batches for record in one.runs[1].rounds}
    assert one.runs[1].planned_rounds == 2 + (100 - pace[2]) / (pace[2] - pace[1])


def test_experiments_that_are_not_finished_come_first(tmp_path: Path, writer: Callable[[Path], Write]) -> None:
    for name, done in (("a", True), ("b", False), ("c", True)):
        folder = writer(tmp_path / name)("fedavg", "t", 0, 70.0)
        if not done:
            (folder / "result.json").unlink()
    found = experiments_in(tmp_path)
    assert [one.finished for one in found] == [False, True, True]


def test_the_page_says_it_and_escapes_it(running: Path) -> None:
    text = watch_page(running)
    for words in ("1 of 4 runs finished, 1 failed", "2 of 8", "41.50", "odd &lt;columns&gt;", "north: no answer",
                  "sent NaN", 'http-equiv="refresh"', "6.00 MB", "0:04"):  # fmt: skip
        assert words in text, words
    assert "<columns>" not in text
    assert f"<h1>{running.name}</h1>" in text
    assert "last round" not in [name for name, _ in read(text).tables["Finished"][0]], "a finished run has none to come"
    assert "<script" not in text
    (running / "exp" / "order.json").write_text("{")
    assert "order.json" in watch_page(running), "a damaged file is a warning"


def test_each_site_of_a_run_that_goes_on_says_what_it_sent(running: Path) -> None:
    run = running / "exp" / "fedavg" / "b" / "seed-0"
    assert "What left each site" not in watch_page(running), "not known of runs that an older version began"
    north = {"up": {"weights": 1_500_000, "numbers": 8}, "down": {"weights": 2_000_000}}
    write_site_bytes(run, {"<north>": north, "south": {"up": {}, "down": {"weights": 2_000_000}}})
    page = watch_page(running)
    assert "<north>" not in page
    _, *rows = read(page).tables["What left each site so far"]
    assert {row[1][0]: [exact for _, exact in row[2:]] for row in rows} == {
        "<north>": [8.0, 1_500_000.0, 2_000_000.0],
        "south": [0.0, 0.0, 2_000_000.0],
    }
    assert {row[0][0] for row in rows} == {"fedavg / b / seed-0"}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A coordinator's kit whose service does not run, with a deployment that has not begun its first run."""
    kit = tmp_path / "kits" / "federation" / "coordinator"
    deployment = kit / "deployments" / "study"
    deployment.mkdir(parents=True)
    project = {
        "name": "p",
        "contact": "p@example.org",
        "server": "localhost",
        "port": 8002,
        "sites": ["north", "south"],
    }
    (kit / "kit.json").write_text(json.dumps({"role": "coordinator", "name": "coordinator", "project": project}))
    write_object(deployment / "wanted.json", {"want": "run", "request": 2})
    return kit


def test_a_deployment_says_whom_it_waits_for_and_who_does_not_answer(kit: Path) -> None:
    study = kit / "deployments" / "study"
    waiting = {"state": "waiting", "request": 2, "message": "for south to connect"}
    write_object(study / "state.json", waiting)
    page = watch_page(kit.parents[1])
    assert "Deployment waiting: for south to connect." in page, "found from above, before it has runs"
    assert "service does not run" in page
    write_object(study / "state.json", {"state": "running", "request": 2})
    for event in (
        {"what": "warning", "message": "clock of <south>"},
        {"what": "experiment", "is": "begun", "runs": 6},
        {"what": "fit", "site": "north", "is": "asked", "round": 3},
        {"what": "fit", "site": "south", "is": "asked", "round": 3},
        {"what": "fit", "site": "north", "is": "answered", "round": 3, "bytes": 5},
        {"what": "trained", "site": "north", "mini_batches": 5},
    ):
        append_event(study / "progress.jsonl", event)
    (one,) = experiments_in(kit)
    assert one.planned == 6
    assert one.deployment.warnings == ("clock of <south>",)
    last = {site.name: site.last for site in one.deployment.sites}
    assert "round 3" in last["north"]
    assert ["no answer" in last[name] for name in ("north", "south")] == [False, True]
    append_event(study / "progress.jsonl", {"what": "fit", "site": "south", "is": "lost", "reason": "no answer"})
    assert "no answer" in watch_page(study)
    write_object(study / "state.json", {"state": "finished", "request": 1})
    assert "Deployment waiting" in watch_page(study), "what has ended was an earlier request"
    write_object(study / "state.json", {"state": "finished", "request": 2})
    (one,) = experiments_in(study)
    assert (one.deployment.stopped, one.deployment.sites) == ("", ()), "nobody is missing once it has ended"


def heard(kit: Path, *events: dict[str, Any]) -> dict[str, SeenSite]:
    """What is said of each site after these events, the last of them now and the others a minute apart."""
    study = kit / "deployments" / "study"
    write_object(study / "state.json", {"state": "running", "request": 2})
    timed = [
        {"time": time.time() - 60 * age} | event for age, event in zip(range(len(events))[::-1], events, strict=True)
    ]
    (study / "progress.jsonl").unlink(missing_ok=True)
    for event in timed:
        append_event(study / "progress.jsonl", event)
    (one,) = experiments_in(kit)
    assert one.deployment is not None
    return {site.name: site for site in one.deployment.sites}


def happened(state: str, number: int, call: str = "fit", **more: str) -> dict[str, Any]:
    return {"what": call, "site": "north", "is": state, "round": number, **more}


def test_a_lost_site_is_missing_until_it_answers_again(kit: Path) -> None:
    """As the coordinator logs a site that was killed under a quorum: it is asked again in every exchange."""
    events = [
        happened("asked", 1), happened("answered", 1),
        happened("asked", 2), happened("lost", 2, reason="no reply within 6 s"),
        happened("asked", 2, "measure"), happened("lost", 2, "measure", reason="no reply within 6 s"),
        happened("asked", 3),
    ]  # fmt: skip
    assert heard(kit, *events[:3])["north"].trouble == "", "it may yet answer"
    north = heard(kit, *events)["north"]
    assert north.lost
    assert "round 2" in north.trouble
    assert "no reply within 6 s" in north.trouble
    assert north.since == pytest.approx(180, abs=5), "since the first loss"
    assert north.age == pytest.approx(0, abs=5)
    assert heard(kit, *events)["south"] == SeenSite("south", "nothing yet", None)
    page = watch_page(kit)
    head, row, _ = read(page).tables["Sites"]
    shown = dict(zip([name for name, _ in head], [text for text, _ in row], strict=True))
    assert shown["site"] == "north"
    assert "no reply within 6 s" in shown["missing"]
    assert shown["since"].startswith("3:0")
    assert "Lost: north." in page
    revoked = heard(kit, *events, happened("lost", 3, reason="its kit was revoked"))["north"]
    assert "round 2" in revoked.trouble
    assert revoked.trouble.endswith("its kit was revoked"), "since the first loss, for the last reason"
    back = heard(kit, *events, {"what": "site", "site": "north", "is": "back"})["north"]
    assert (back.trouble, back.since) == ("", None)
    again = heard(kit, *events, happened("answered", 3))["north"]
    assert (again.trouble, again.since) == ("", None)
    assert "Lost" not in watch_page(kit)


def test_a_site_that_is_there_again_is_still_missing_in_the_round_that_it_missed() -> None:
    record = RoundRecord(
        round=1, target_accuracy={}, seconds=1.0, mini_batches=1, extra={"missing": {"north": "late", "south": "gone"}}
    )
    run = WatchedRun(("fedavg", "east", "0"), None, [record], 8, "", 1.0)
    sites = SeenSite("north", "answered fit, round 1", 1.0), SeenSite("south", "", None, "gone", 9.0, lost=True)
    watched = Watched("exp", [run], 1, Deployed("running", "", "", sites, (), 1))
    (missing,) = (block for block in _blocks(watched) if isinstance(block, Listing))
    assert missing.items == ("north: late (fedavg / east / 0)",)


def test_refused_replies_are_no_answers(kit: Path) -> None:
    refused = [happened("asked", 1), happened("answered", 1), happened("refused", 1, reason="not finite")]
    events = [*refused, happened("asked", 2), happened("answered", 2), happened("refused", 2, reason="not finite")]
    north = heard(kit, *events, happened("asked", 3))["north"]
    assert not north.lost
    assert "round 2" not in north.trouble
    assert north.trouble.endswith("not finite")
    assert north.since == pytest.approx(240, abs=5)
    good = [happened("asked", 3), happened("answered", 3), happened("asked", 4)]
    assert heard(kit, *events, *good)["north"].trouble == ""
    absent = heard(kit, happened("lost", 0, reason="no answer"), *refused)["north"]
    assert not absent.lost, "it is there again"
    assert "round 1" in absent.trouble
    assert absent.since == pytest.approx(0, abs=5)
    measuring = [happened("asked", 1, "measure"), happened("refused", 1, "measure", reason="policy.send")]
    training = [happened("asked", 2), happened("answered", 2)]
    north = heard(kit, *measuring, *training, happened("asked", 2, "measure"))["north"]
    assert "policy.send" in north.trouble
    assert not north.lost
    lost = heard(kit, *measuring, happened("asked", 2), happened("lost", 2, reason="no answer"))["north"]
    assert lost.lost, "a site that is not there is told first"
    assert lost.trouble.endswith("no answer")


def test_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no run" in watch_page(tmp_path / "empty")
    with pytest.raises(UserError, match="no folder"):
        experiments_in(tmp_path / "absent")


@pytest.fixture
def port(running: Path) -> Iterator[int]:
    with server(running, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert serving.server_address[0] == "127.0.0.1", "no other machine reaches it"
        yield serving.server_port
        serving.shutdown()
        thread.join()


def asked(port: int, method: str = "GET", path: str = "/", host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


@pytest.mark.threat("watched_page")
def test_only_this_machine_reads_it_and_nobody_writes(port: int, running: Path) -> None:
    answer = asked(port)
    assert answer.status == 200
    assert "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "")
    assert asked(port, path="/../../etc/passwd").status == 404
    assert asked(port, host=f"evil.example:{port}").status == 403, "a stranger's name that leads here"
    assert {asked(port, method).status for method in ("POST", "PUT", "DELETE")} == {501}
    with pytest.raises(UserError, match="--port"):
        server(running, port)
