"""A site's policy by itself: how long rounds count, and that what a reply really holds is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loopback import (
    SETTING,
    SITES,
    Loopback,
    deploy,
    options_of,
    request,
    site_file,
    write_data,
)
from test_hostile_coordinator import ENVELOPE, program_of

from fedshift.deploy.remote import policy as policies
from fedshift.deploy.remote.policy import AuditLog, Policy
from fedshift.errors import FedshiftError, KindRefused, Refused, UserError
from fedshift.federation.messages import Features, Update
from fedshift.federation.site import Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights

HOUR = 3600


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the log sees; its one entry may be changed."""
    now = [1_000_000.0]
    monkeypatch.setattr(policies.time, "time", lambda: now[0])
    return now


@pytest.mark.threat("again_and_again")
@pytest.mark.parametrize("reopened", [False, True])
def test_rounds_count_for_a_day(clock: list[float], reopened: bool, tmp_path: Path) -> None:
    """Two rounds a day, done at 0 h and 10 h: a third may begin at 24 h and a bit, and a fourth at 34 h."""
    rule, log = Policy(rounds_per_day=2), AuditLog(tmp_path / "audit.jsonl")
    begun = clock[0]

    def asks(hours: float, number: int) -> bool:
        nonlocal log
        clock[0] = begun + hours * HOUR
        if reopened:
            log = AuditLog(tmp_path / "audit.jsonl")
        try:
            log.check_rate("north", rule, "run", number)
        except Refused:
            return False
        log.append(do="call", run="run", round=number)
        return True

    done = {hours: asks(hours, number) for hours, number in [(0, 1), (10, 2), (23.9, 3), (24.1, 3), (25, 4), (34.1, 4)]}
    assert done == {0: True, 10: True, 23.9: False, 24.1: True, 25: False, 34.1: True}


def test_a_round_that_has_begun_goes_on_at_the_limit(clock: list[float], tmp_path: Path) -> None:
    """Requests of a round that is counted already are no further rounds, up to their own limit."""
    rule, log = Policy(rounds_per_day=1, requests_per_round=3), AuditLog(tmp_path / "audit.jsonl")
    for _ in range(3):
        log.check_rate("north", rule, "run", 1)
        log.append(do="measure", run="run", round=1)
    with pytest.raises(Refused, match=r"requests_per_round: 3"):
        log.check_rate("north", rule, "run", 1)
    with pytest.raises(Refused, match=r"rounds_per_day: 1"):
        log.check_rate("north", rule, "other", 1)  # a round of another run is a round


def test_what_does_not_work_counts_for_nothing(clock: list[float], tmp_path: Path) -> None:
    """Greetings, refusals and answers that are sent again use no round up."""
    rule, log = Policy(rounds_per_day=1), AuditLog(tmp_path / "audit.jsonl")
    log.append(do="hello", run="run", round=1)
    log.append(do="call", run="run", round=2, refused="no")
    log.append(do="call", run="run", round=3, again=True)
    log.check_rate("north", rule, "run", 4)


@pytest.mark.threat("kept_kind")
def test_a_kind_that_no_field_promised_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that puts features where its reply type says weights is found out by what it sends."""

    def smuggle(self: FedAvg, site: Site, weights: Weights) -> Update:
        batch = next(iter(site.batches()))
        return Update(Features({"features": batch.inputs}), site.samples, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(FedAvg, "fit", smuggle)
    program = program_of(tmp_path)
    answer = request(program)
    assert "refuses to send features" in answer["message"]
    lines = program.config.audit_log.read_text().splitlines()
    assert "refused" in json.loads(lines[-1])
    assert "sent" not in json.loads(lines[-1])
    allowed = program_of(tmp_path / "open", send=["weights", "numbers", "accuracy", "features"])
    assert "error" not in request(allowed)


def test_only_aggregates_need_a_group() -> None:
    """Features are of single samples whatever their number; means and models are held to the rule."""
    rule = Policy(smallest_group=5)
    rule.check_group("north", "features", 1, "a call")
    for kind in ("weights", "numbers", "accuracy", "statistics"):
        rule.check_group("north", kind, 5, "a call")
        with pytest.raises(Refused):
            rule.check_group("north", kind, 4, "a call")


def test_how_many_samples_a_call_looked_at(tmp_path: Path) -> None:
    """28 training samples (of 40, 30 % held out), batches of 8, two of them left: 16 are behind the model."""
    training: dict[str, Any] = {"batch_size": 8, "lr": 0.1}
    for group, allowed in ((16, True), (17, False)):
        program = program_of(tmp_path / str(group), smallest_group=group)
        asked = request(
            program, setting={**SETTING, "training": training}, envelope={**ENVELOPE, "mini_batches_left": 2}
        )
        assert ("error" not in asked) is allowed, asked


def test_a_number_of_a_day_is_not_that_of_another_run(clock: list[float], tmp_path: Path) -> None:
    rule, log = Policy(rounds_per_day=2), AuditLog(tmp_path / "audit.jsonl")
    for run in ("one", "two"):
        log.check_rate("north", rule, run, 1)
        log.append(do="call", run=run, round=1)
    with pytest.raises(Refused):
        log.check_rate("north", rule, "three", 1)


def test_rounds_in_a_log_of_before_count(clock: list[float], tmp_path: Path) -> None:
    """Version 1 of the requests named a call ``step``. Its logs are read on, so an upgrade gives no round away."""
    rule, before = Policy(rounds_per_day=1), AuditLog(tmp_path / "audit.jsonl")
    before.append(do="step", step="fit", run="run", round=1)
    with pytest.raises(Refused, match="rounds_per_day"):
        AuditLog(tmp_path / "audit.jsonl").check_rate("north", rule, "run", 2)


def test_a_round_counts_from_its_first_request(clock: list[float], tmp_path: Path) -> None:
    """Requests at 0 h and 20 h are one round, which has expired at 24 h and a bit."""
    rule, log = Policy(rounds_per_day=1), AuditLog(tmp_path / "audit.jsonl")
    begun = clock[0]
    for hours in (0, 20):
        clock[0] = begun + hours * HOUR
        log.check_rate("north", rule, "run", 1)
        log.append(do="call", run="run", round=1)
    clock[0] = begun + 23 * HOUR
    with pytest.raises(Refused):
        log.check_rate("north", rule, "run", 2)
    clock[0] = begun + 24.1 * HOUR
    log.check_rate("north", rule, "run", 2)


@pytest.mark.threat("code_or_method")
def test_which_methods_may_run() -> None:
    """By name, and none that sends a kind that may not leave."""
    few = Policy(methods=("fedavg", "csac"), send=("weights", "numbers"))
    few.check_method("north", "fedavg", ("weights", "numbers"))
    with pytest.raises(Refused):
        few.check_method("north", "fedprox", ("weights", "numbers"))
    with pytest.raises(KindRefused):
        few.check_method("north", "csac", ("weights", "styles"))
    Policy().check_method("north", "anything", ("weights",))


@pytest.mark.parametrize(
    ("policy", "method", "rule"),
    [
        ({"methods": ["csac"]}, {"name": "fedavg"}, "policy.methods: csac"),
        ({"methods": ["styles"]}, {"name": "styles", "method": "fedavg"}, "policy.methods: styles"),
        ({"send": ["numbers", "accuracy"]}, {"name": "fedavg"}, "policy.send"),
        ({"send": ["weights", "numbers"]}, {"name": "fedavg"}, "policy.send"),
        ({"smallest_group": 20}, {"name": "fedavg"}, "policy.smallest_group: 20"),
        ({"rounds_per_day": 2}, {"name": "fedavg"}, "policy.rounds_per_day: 2"),
    ],
)
def test_a_refusal_names_the_rule_and_ends_the_run(
    policy: dict[str, Any], method: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    files = write_data(tmp_path / "data", SITES)
    every = {"send": ["weights", "numbers", "accuracy", "styles"]}
    places = {site: site_file(tmp_path, site, files[site], **every) for site in SITES}
    places["south"] = site_file(tmp_path, "south", files["south"], **{**every, **policy})
    with pytest.raises(UserError, match=rf"site 'south' .*\(rule {rule}"):
        deploy(tmp_path, options_of(method), transport=Loopback(places))
    log = [json.loads(line) for line in (tmp_path / "south/memory/audit.jsonl").read_text().splitlines()]
    assert rule in log[-1]["refused"]
    if "rounds_per_day" not in rule and policy.get("send") != ["weights", "numbers"]:
        assert not any(line["do"] == "call" for line in log), "before any training"


@pytest.mark.threat("changed_log")
def test_the_audit_log_is_a_chain(tmp_path: Path) -> None:
    deploy(tmp_path, options_of({"name": "fedavg"}))
    log = tmp_path / "north/memory/audit.jsonl"
    lines, last = AuditLog.check(log)
    assert [line["do"] for line in lines] == ["hello", *["call", "measure"] * 3, "end"]
    first = lines[1]
    assert first["method"] == "fedavg"
    assert first["call"] == "fit"
    assert first["sent"]["weights"]["kind"] == "weights"
    assert first["sent"]["weights"]["shapes"]["classifier.bias"] == [3]
    assert first["sent"]["samples"] == {"kind": "numbers"}
    assert first["sent_bytes"] > first["sent"]["weights"]["bytes"]
    assert len(first["received_digest"]) == len(first["sent_digest"]) == len(last) == 64

    text = log.read_text()
    for spoiled in (
        text.replace('"call": "fit"', '"call": "fat"', 1),
        "\n".join([*text.splitlines()[:2], *text.splitlines()[3:]]) + "\n",
        text.replace("\n", "\n\n", 1),
    ):
        log.write_text(spoiled)
        with pytest.raises(FedshiftError, match=r"audit.jsonl, line \d+: the log was changed here"):
            AuditLog.check(log)
    log.write_text(text + '{"half a li')  # the machine stopped while it was written
    assert AuditLog.check(log) == (lines, last)


@pytest.mark.parametrize(
    ("train", "held_out", "what"),
    [(9, 0, "training samples"), (50, 9, "held-out samples"), (50, 0, None), (10, 10, None)],
)
def test_counts_of_few_samples_do_not_leave(tmp_path: Path, train: int, held_out: int, what: str | None) -> None:
    program = program_of(tmp_path, smallest_group=10)
    if what is None:
        program._check_counts({"0": (train, held_out)})
    else:
        with pytest.raises(Refused, match=f"the count of its {what}: 9 ") as caught:
            program._check_counts({"0": (train, held_out)})
        assert "9" not in (caught.value.public or "")
