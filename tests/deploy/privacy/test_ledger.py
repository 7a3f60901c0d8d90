"""What a site spent of its budget cannot be forgotten: ledger, secret and audit log know of each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import request
from test_site_budget import ASKED, lines, program, site_with_budget
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.deploy.privacy.ledger import LEDGER, SECRET, PrivacyLedger, lost_records, recover_records
from fedshift.deploy.remote.policy import AuditLog, Policy, PrivacyBudget
from fedshift.deploy.site_cards import GivenPrivacy, noted_spending
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.encryption import write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.functional.differential_privacy import NoisySteps

AUDIT, END = "audit.jsonl", "audit-end.json"


@pytest.fixture(scope="module", autouse=True)
def _with_opacus() -> None:
    pytest.importorskip("opacus")


@pytest.fixture(scope="module")
def used_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site that answered four exchanges of four steps each."""
    folder = tmp_path_factory.mktemp("spent")
    site = program(folder)
    shutil.copytree(site.config.memory, folder / "before")  # a backup
    for number in range(1, 5):
        assert "error" not in ask(site, number)
        if number == 2:
            shutil.copytree(site.config.memory, folder / "half")
    return folder


def ask(site: SiteProgram, number: int, **changes: Any) -> dict[str, Any]:
    envelope = {"exchange": number, "round": number, "progress": 0.0, "mini_batches_left": 5}
    return request(site, setting=ASKED, envelope=envelope, **changes)


def copy_of(used_ledger: Path, folder: Path) -> Path:
    """A site of its own with that memory; its SITE.yaml."""
    site_yaml = site_with_budget(folder)
    shutil.copytree(used_ledger / "north" / "memory", site_yaml.parent / "memory")
    return site_yaml


def cut(name: str, keep: int) -> Callable[[Path, Path], None]:
    def do(memory: Path, _: Path) -> None:
        whole = (memory / name).read_text().splitlines(keepends=True)
        (memory / name).write_text("".join(whole[:keep]))

    return do


def remove(*names: str) -> Callable[[Path, Path], None]:
    def do(memory: Path, _: Path) -> None:
        for name in names:
            (memory / name).unlink()

    return do


def put_back(backup: str, *names: str) -> Callable[[Path, Path], None]:
    def do(memory: Path, used_ledger: Path) -> None:
        for name in names:
            shutil.copy(used_ledger / backup / name, memory / name)

    return do


def overwritten(memory: Path, _: Path) -> None:
    write_private(memory / SECRET, bytes(32))


HARM = [
    pytest.param(cut(LEDGER, 3), marks=pytest.mark.case("forgotten budget", "the ledger cut to three lines")),
    pytest.param(cut(LEDGER, 4), marks=pytest.mark.case("forgotten budget", "the ledger's last line cut off")),
    pytest.param(cut(LEDGER, 0), marks=pytest.mark.case("forgotten budget", "the ledger emptied")),
    pytest.param(remove(LEDGER), marks=pytest.mark.case("forgotten budget", "the ledger removed")),
    pytest.param(put_back("half", LEDGER), marks=pytest.mark.case("forgotten budget", "the ledger from a backup")),
    pytest.param(put_back("before", LEDGER), marks=pytest.mark.case("forgotten budget", "the ledger of the beginning")),
    pytest.param(remove(SECRET), marks=pytest.mark.case("forgotten budget", "the secret removed")),
    pytest.param(overwritten, marks=pytest.mark.case("forgotten budget", "another secret")),
    pytest.param(remove(LEDGER, SECRET), marks=pytest.mark.case("forgotten budget", "ledger and secret removed")),
    pytest.param(remove(LEDGER, AUDIT, END), marks=pytest.mark.case("forgotten budget", "only the secret is left")),
    pytest.param(cut(AUDIT, 2), marks=pytest.mark.case("forgotten budget", "the audit log cut at a stopped site")),
    pytest.param(remove(AUDIT, END), marks=pytest.mark.case("forgotten budget", "the audit log and its end removed")),
    pytest.param(put_back("half", AUDIT), marks=pytest.mark.case("forgotten budget", "the audit log from a backup")),
    pytest.param(
        put_back("half", AUDIT, END), marks=pytest.mark.case("forgotten budget", "audit log and end from a backup")
    ),
    pytest.param(
        put_back("half", LEDGER, AUDIT), marks=pytest.mark.case("forgotten budget", "ledger and audit log of a backup")
    ),
]


@pytest.mark.threat("old_backup")
@pytest.mark.parametrize("harm", HARM)
def test_a_site_that_lacks_its_records_refuses_until_a_person_gives_them_up(
    harm: Callable[[Path, Path], None], used_ledger: Path, tmp_path: Path
) -> None:
    """Started or running; then, what it gave up counts: never less than was spent."""
    site_yaml = copy_of(used_ledger, tmp_path)
    config = load_site(site_yaml)
    running = SiteProgram(config)
    before = running.rules.ledger.epsilon()
    harm(config.memory, used_ledger)
    assert ask(running, 9).get("error")
    (fault,) = lost_records(config)
    assert "site recover" in fault
    assert "\n" not in fault
    with pytest.raises(FedshiftError, match="site recover"):
        SiteProgram(config)
    shown = CliRunner().invoke(app, ["site", "check", str(site_yaml)])
    assert isinstance(shown.exception, UserError | SystemExit), shown.output

    assert recover_records(config)
    assert lost_records(config) == []
    assert not recover_records(config)
    site = SiteProgram(config)
    assert site.rules.ledger.epsilon() >= before * (1 - 1e-9)
    assert AuditLog.check(config.audit_log)[0][-1]["do"] == "recover"


@pytest.mark.case("forgotten budget", "the ledger cut under a running process, without an audit log to compare with")
def test_a_running_site_notices_that_its_ledger_was_cut(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, "north", PrivacyBudget(epsilon=8))
    for number in range(3):
        ledger.pay(ledger.mark(number=number), NoisySteps(3.0, 0.1, 4))
    cut(LEDGER, 2)(tmp_path, tmp_path)
    with pytest.raises(Refused, match="2 of 4 lines"):
        ledger.check("m", NoisySteps(3.0, 0.1, 4))
    with pytest.raises(Refused, match="2 of 4 lines"):
        ledger.pay("m", NoisySteps(3.0, 0.1, 4))


@pytest.mark.case("forgotten budget", "what the audit log knows is counted exactly once more")
def test_what_the_audit_log_knows_is_counted_exactly(used_ledger: Path, tmp_path: Path) -> None:
    config = load_site(copy_of(used_ledger, tmp_path))
    site = SiteProgram(config)
    before = site.rules.ledger.epsilon()
    (config.memory / LEDGER).unlink()
    recover_records(config)
    site = SiteProgram(config)
    assert site.rules.ledger.epsilon() == pytest.approx(before)
    assert "error" not in ask(site, 1)  # an exchange that was paid: as before, and free
    assert site.rules.ledger.epsilon() == pytest.approx(before)
    assert "error" not in ask(site, 9)
    assert site.rules.ledger.epsilon() > before


@pytest.mark.case("forgotten budget", "lines of an earlier fedshift that do not say what they cost")
def test_unknown_costs_use_up_the_budget(used_ledger: Path, tmp_path: Path) -> None:
    config = load_site(copy_of(used_ledger, tmp_path))
    old = [json.loads(line) for line in config.audit_log.read_text().splitlines()]
    for file in (AUDIT, END, LEDGER):
        (config.memory / file).unlink()
    log = AuditLog(config.audit_log)
    for line in old:
        log.append(**{name: value for name, value in line.items() if name not in ("ledger", "previous", "time")})
    assert lost_records(config)
    recover_records(config)
    assert SiteProgram(config).rules.ledger.epsilon() > 100
    assert "privacy.epsilon" in ask(SiteProgram(config), 11)["message"]


@pytest.mark.case("forgotten budget", "a secret was drawn and the site killed before the file was written")
def test_a_kill_at_the_beginning_harms_nobody(tmp_path: Path) -> None:
    site = program(tmp_path)
    (site.config.memory / SECRET).unlink()
    again = SiteProgram(site.config)
    assert "error" not in ask(again, 1)
    assert len(lines(again)) == 1
    assert lost_records(site.config) == []


@pytest.mark.case("forgotten budget", "a killed site: the ledger has a line that the audit log lacks")
def test_a_kill_between_ledger_and_audit_log_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = program(tmp_path)

    def stop_here(**entry: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.log, "append", stop_here)
        with pytest.raises(KeyboardInterrupt):
            ask(site, 1)
    assert lost_records(site.config) == []
    again = SiteProgram(site.config)
    assert "error" not in ask(again, 1)
    assert len(lines(again)) == 1


@pytest.mark.threat("cut_log")
@pytest.mark.case("limits of a day", "the audit log, which they are counted from, cut at a stopped site")
def test_limits_of_a_day_are_not_forgotten_with_the_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log.jsonl")
    for number in range(3):
        log.append(do="measure", run="r", round=number)
    whole = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    for kept in (whole[:1], [], [*whole[:2], whole[1]]):
        (tmp_path / "log.jsonl").write_text("".join(kept))
        with pytest.raises(FedshiftError, match="site recover"):
            AuditLog(tmp_path / "log.jsonl").check_rate("north", Policy(measurements_per_day=3), "r", 4, measures=True)
    (tmp_path / "log.jsonl").write_text("".join(whole) + '{"half')  # of a killed process
    AuditLog(tmp_path / "log.jsonl").append(do="measure", run="r", round=4)
    (tmp_path / "log-end.json").write_text("{")
    with pytest.raises(FedshiftError, match=r"log-end\.json"):
        AuditLog(tmp_path / "log.jsonl")


def budget_told(*spent: tuple[float, float, int]) -> GivenPrivacy:
    return GivenPrivacy(epsilon=8.0, delta=1e-5, measurement_noise=None, spent=spent)


@pytest.mark.threat("old_backup")
@pytest.mark.case("forgotten budget", "a site tells the coordinator of fewer steps than before")
def test_the_coordinator_refuses_a_site_that_told_more_before(tmp_path: Path) -> None:
    file = tmp_path / "spent.json"
    assert noted_spending(file, {"north": budget_told((3.0, 0.1, 40)), "south": budget_told()}) == ([], [])
    more = {"north": budget_told((3.0, 0.1, 40), (2.0, 1.0, 1)), "south": budget_told((3.0, 0.1, 1))}
    assert noted_spending(file, more) == ([], [])
    fewer = {"north": budget_told((3.0, 0.1, 39), (2.0, 1.0, 1)), "south": budget_told((3.0, 0.1, 1))}
    for _ in range(2):  # and again, until they are back
        _, (fault,) = noted_spending(file, fewer)
        assert "'north'" in fault
        assert "\n" not in fault
    assert len(noted_spending(file, {"north": budget_told(), "south": budget_told()})[1]) == 2
    (line,), faults = noted_spending(file, {**more, "south": None})
    assert ("has none now" in line, faults) == (True, [])
    dear = {
        **more,
        "south": budget_told((0.05, 1.0, 1)),
    }  # what is lost was counted as something else, which costs more
    for _ in range(2):
        assert noted_spending(file, dear) == ([], [])
    assert len(noted_spending(file, more)[1]) == 1
    file.write_text("{")
    assert "spent.json is damaged" in noted_spending(file, {"north": budget_told()})[0][0]
