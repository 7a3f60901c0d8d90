"""What a site spent of its budget cannot be forgotten: ledger, secret and audit log know of each other."""

from __future__ import annotations

import base64
import io
import json
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked import request
from outcomes import one_line
from test_site_budget import ASKED, lines, program, site_with_budget
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.deploy import site_backup
from fedshift.deploy.privacy.ledger import LEDGER, SECRET, PrivacyLedger, lost_records, recover_records
from fedshift.deploy.remote.policy import AuditLog, Policy, PrivacyBudget
from fedshift.deploy.role_file import role_file
from fedshift.deploy.sinks import FileSink, Forwarder
from fedshift.deploy.site_backup import back_up, restore
from fedshift.deploy.site_cards import GivenPrivacy, noted_spending
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.encryption import write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.functional.differential_privacy import NoisySteps
from tried import case, slow_after

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
    case("forgotten budget", "the ledger cut to three lines", cut(LEDGER, 3)),
    case("forgotten budget", "the ledger's last line cut off", cut(LEDGER, 4)),
    case("forgotten budget", "the ledger emptied", cut(LEDGER, 0)),
    case("forgotten budget", "the ledger removed", remove(LEDGER)),
    case("forgotten budget", "the ledger from a backup", put_back("half", LEDGER)),
    case("forgotten budget", "the ledger of the beginning", put_back("before", LEDGER)),
    case("forgotten budget", "the secret removed", remove(SECRET)),
    case("forgotten budget", "another secret", overwritten),
    case("forgotten budget", "ledger and secret removed", remove(LEDGER, SECRET)),
    case("forgotten budget", "only the secret is left", remove(LEDGER, AUDIT, END)),
    case("forgotten budget", "the audit log cut at a stopped site", cut(AUDIT, 2)),
    case("forgotten budget", "the audit log and its end removed", remove(AUDIT, END)),
    case("forgotten budget", "the audit log from a backup", put_back("half", AUDIT)),
    case("forgotten budget", "audit log and end from a backup", put_back("half", AUDIT, END)),
    case("forgotten budget", "ledger and audit log of a backup", put_back("half", LEDGER, AUDIT)),
]


@pytest.mark.threat("old_backup")
@pytest.mark.parametrize("harm", slow_after(4, HARM))
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
    assert (len(lines(again)), lost_records(site.config)) == (1, [])


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


RECORDS = (AUDIT, END, LEDGER, SECRET)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site that answered once, was backed up, and answered three times more; and the copy that a file sink has."""
    folder = tmp_path_factory.mktemp("world")
    site = program(folder)
    sink = Forwarder(
        "north", FileSink(kind="file", path=folder / "sink"), lambda: {"audit": site.log.path}, folder / "sent", print
    )
    for number in range(1, 5):
        assert "error" not in ask(site, number)
        sink.forward()
        if number == 1:
            back_up(site.config, folder / "yesterday.backup")
            shutil.copytree(site.config.memory, folder / "memory-of-yesterday")
            shutil.copy(folder / "sink", folder / "sink-of-yesterday")
    return folder


def truth(world: Path) -> float:
    return epsilon(world / "north" / "SITE.yaml")


def epsilon(path: Path) -> float:
    config = load_site(path)
    return PrivacyLedger(config.memory, "north", config.file.privacy, AuditLog(config.audit_log)).epsilon()


def today(world: Path, folder: Path) -> Path:
    """The site of today; its SITE.yaml."""
    site_yaml = site_with_budget(folder)
    shutil.copytree(world / "north" / "memory", site_yaml.parent / "memory")
    return site_yaml


def count_answers(path: Path) -> int:
    """How many further exchanges the site answers with noise."""
    site, number = SiteProgram(load_site(path)), 10
    while number < 40 and "error" not in ask(site, number):
        number += 1
    return number - 10


@pytest.mark.threat("old_backup")
def test_yesterdays_backup_over_todays_records_changes_nothing(world: Path, tmp_path: Path) -> None:
    site_yaml = today(world, tmp_path)
    before = {name: (site_yaml.parent / "memory" / name).read_bytes() for name in RECORDS}
    done = restore(world / "yesterday.backup", site_yaml)
    assert done.counted == ""
    assert {name: (site_yaml.parent / "memory" / name).read_bytes() for name in RECORDS} == before
    assert (epsilon(site_yaml), lost_records(done.config)) == (truth(world), [])


@pytest.mark.threat("old_backup")
@pytest.mark.parametrize(
    "lost", [RECORDS, (LEDGER,), (LEDGER, SECRET), (LEDGER, AUDIT, END), (AUDIT, END), (SECRET,), (END,)]
)
def test_with_records_lost_never_less_counts_than_was_spent(lost: tuple[str, ...], world: Path, tmp_path: Path) -> None:
    """Restore yesterday's backup, train again. Whichever files are gone: the site refuses, or counts them as spent."""
    site_yaml = today(world, tmp_path)
    for name in lost:
        (site_yaml.parent / "memory" / name).unlink()
    done = restore(world / "yesterday.backup", site_yaml)
    if lost_records(done.config):
        with pytest.raises(FedshiftError, match="site recover"):
            SiteProgram(done.config)
        return
    assert epsilon(site_yaml) >= truth(world)
    if LEDGER in lost:
        assert "all of the budget" in done.counted
        assert count_answers(site_yaml) == 0


@pytest.mark.slow
@pytest.mark.threat("old_backup")
def test_the_newest_copy_of_the_log_saves_what_is_left_of_the_budget(world: Path, tmp_path: Path) -> None:
    site_yaml = tmp_path / "north" / "SITE.yaml"
    done = restore(world / "yesterday.backup", site_yaml, world / "sink")
    assert (lost_records(done.config), AuditLog.check(done.config.audit_log)[0][-1]["do"]) == ([], "recover")
    assert "one exchange more" in done.counted
    config = load_site(site_with_budget(tmp_path / "data-of-it"))
    shutil.copy(config.path, site_yaml)  # its data lie elsewhere on the new machine
    whole = epsilon(site_yaml)
    assert whole > truth(world)
    left = count_answers(today(world, tmp_path / "today"))
    assert 0 < count_answers(site_yaml) <= left
    again = restore(world / "yesterday.backup", site_yaml, world / "sink")
    assert (again.counted, epsilon(site_yaml) >= whole) == ("", True)


@pytest.mark.threat("old_backup")
def test_yesterdays_copy_with_yesterdays_backup_is_caught_at_the_coordinator(world: Path, tmp_path: Path) -> None:
    """As is a whole memory that somebody copied back by hand: the site cannot notice it, the coordinator does."""

    def spending_at(path: Path) -> Any:
        config = load_site(path)
        ledger = PrivacyLedger(config.memory, "north", config.file.privacy)
        return budget_told(
            *((steps.noise_multiplier, steps.sample_rate, steps.steps) for steps in ledger.noisy_steps())
        )

    assert noted_spending(tmp_path / "spent.json", {"north": spending_at(world / "north" / "SITE.yaml")}) == ([], [])
    by_hand = site_with_budget(tmp_path / "by-hand")
    shutil.copytree(world / "memory-of-yesterday", by_hand.parent / "memory")
    assert lost_records(load_site(by_hand)) == []
    restored = tmp_path / "restored" / "SITE.yaml"
    restore(world / "yesterday.backup", restored, world / "sink-of-yesterday")
    for path in (by_hand, restored):
        warnings, (fault,) = noted_spending(tmp_path / "spent.json", {"north": spending_at(path)})
        assert not warnings
        assert "site restore" in fault
    whole = tmp_path / "whole" / "SITE.yaml"
    restore(world / "yesterday.backup", whole)
    assert noted_spending(tmp_path / "spent.json", {"north": spending_at(whole)}) == ([], [])


def test_a_log_of_another_life_is_not_mixed(world: Path, tmp_path: Path) -> None:
    other = program(tmp_path)
    ask(other, 7)
    with pytest.raises(FedshiftError, match="another log"):
        restore(world / "yesterday.backup", other.config.path)


def test_copies_that_are_older_cut_or_shortened_are_refused(world: Path, tmp_path: Path) -> None:
    lines = (world / "sink").read_text().splitlines(keepends=True)
    copies = {
        "empty": ([], "older than the backup"),
        "gap": ([*lines[:1], *lines[2:]], "no whole copy"),
        "short": ([line.replace('"line"', '"short"') for line in lines], "no whole copy"),
        "text": (["hello\n"], "no whole copy"),
    }
    for name, (content, message) in copies.items():
        (tmp_path / name).write_text("".join(content))
        with one_line(message, FedshiftError):
            restore(world / "yesterday.backup", tmp_path / f"north-{name}" / "SITE.yaml", tmp_path / name)
    plain = [json.loads(line)["line"] + "\n" for line in lines]
    (tmp_path / "plain").write_text("".join([*plain[:1], *plain[2:]]))
    with pytest.raises(FedshiftError, match="line 2: the log was changed here"):
        restore(world / "yesterday.backup", tmp_path / "north-plain" / "SITE.yaml", tmp_path / "plain")
    twice = tmp_path / "twice"  # a line that arrived twice
    twice.write_text("".join([*lines[:2], *lines[1:]]))
    restore(world / "yesterday.backup", tmp_path / "north" / "SITE.yaml", twice)


def archive(names: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        for name in names:
            data = json.dumps({"fedshift_backup": 1, "site": "north"}).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.parametrize(
    "extra", ["../evil", "/etc/evil", "memory/../../evil", "elsewhere/evil", "kit/../evil", "backup.json/../x"]
)
def test_a_backup_writes_nowhere_else(extra: str, tmp_path: Path) -> None:
    write_private(tmp_path / "b", archive(["backup.json", "SITE.yaml", extra]))
    with pytest.raises(UserError, match="damaged"):
        restore(tmp_path / "b", tmp_path / "site" / "SITE.yaml")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b"]


def test_a_damaged_backup_is_one_line(world: Path, tmp_path: Path) -> None:
    whole = (world / "yesterday.backup").read_bytes()
    for at in (3, len(whole) // 2, len(whole) - 3):
        flipped = bytearray(whole)
        flipped[at] ^= 4
        (tmp_path / "b").write_bytes(flipped)
        with one_line("damaged", FedshiftError):
            restore(tmp_path / "b", tmp_path / "north" / "SITE.yaml")
    with pytest.raises(UserError, match="cannot read"):
        restore(tmp_path / "absent", tmp_path / "SITE.yaml")


def test_the_commands(world: Path, tmp_path: Path) -> None:
    """One command each; the file is private, and an encrypted one opens with its key alone."""
    site_yaml, out = today(world, tmp_path), tmp_path / "north.backup"
    output = CliRunner().invoke(app, ["site", "backup", str(site_yaml), "--out", str(out)])
    assert output.exit_code == 0, output.output
    assert "private key" in output.output
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    new = tmp_path / "new" / "SITE.yaml"
    output = CliRunner().invoke(app, ["site", "restore", str(out), str(new)])
    assert output.exit_code == 0, output.output
    assert "all of the budget" in output.output
    assert role_file(new).sink is None
    key = {"FEDSHIFT_KEY": base64.b64encode(bytes(range(32))).decode()}
    shutil.rmtree(site_yaml.parent / "memory")
    assert CliRunner().invoke(app, ["site", "backup", str(site_yaml), "--out", str(out)], env=key).exit_code == 0
    assert b"north" not in out.read_bytes()
    assert CliRunner().invoke(app, ["site", "restore", str(out), str(new)]).exception
    output = CliRunner().invoke(app, ["site", "restore", str(out), str(tmp_path / "c" / "SITE.yaml")], env=key)
    assert output.exit_code == 0, output.output


def test_a_site_without_a_budget_has_nothing_to_count(tmp_path: Path) -> None:
    from test_hostile_coordinator import program_of

    site = program_of(tmp_path)
    assert "error" not in request(site)
    back_up(site.config, tmp_path / "b")
    done = restore(tmp_path / "b", tmp_path / "new" / "SITE.yaml")
    assert (done.counted, len(AuditLog.check(done.config.audit_log)[0])) == ("", 1)


@pytest.mark.parametrize(("most", "fits"), [(200, True), (100, False)])
def test_all_files_together_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    head = json.dumps({"fedshift_backup": 1, "site": "north"}).encode()
    backup, held = tmp_path / "north.backup", io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, content in (("backup.json", head), ("SITE.yaml", b" " * 45), ("memory/a", b" " * 45)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    write_private(backup, held.getvalue())
    monkeypatch.setattr(site_backup, "_MOST_BYTES", most)
    if fits:
        assert site_backup._unpack(backup)[1] == "north"
    else:
        with pytest.raises(UserError, match="damaged"):
            site_backup._unpack(backup)
