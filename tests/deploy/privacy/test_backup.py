"""Backup and restore of a site: whoever puts yesterday's backup back and trains again spends nothing twice."""

from __future__ import annotations

import base64
import io
import json
import shutil
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from loopback import request
from test_ledger import AUDIT, END, ask
from test_ledger import budget_told as budget_of
from test_site_budget import program, site_with_budget
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.deploy import site_backup
from fedshift.deploy.privacy.ledger import LEDGER, SECRET, PrivacyLedger, lost_records
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.role_file import role_file
from fedshift.deploy.sinks import FileSink, Forwarder
from fedshift.deploy.site_backup import back_up, restore
from fedshift.deploy.site_cards import noted_spending
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.encryption import write_private
from fedshift.errors import FedshiftError, UserError

RECORDS = (AUDIT, END, LEDGER, SECRET)


@pytest.fixture(scope="module", autouse=True)
def _with_opacus() -> None:
    pytest.importorskip("opacus")


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
    """ε that was spent."""
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
    assert epsilon(site_yaml) == truth(world)
    assert lost_records(done.config) == []


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


@pytest.mark.threat("old_backup")
def test_the_newest_copy_of_the_log_saves_what_is_left_of_the_budget(world: Path, tmp_path: Path) -> None:
    site_yaml = tmp_path / "north" / "SITE.yaml"
    done = restore(world / "yesterday.backup", site_yaml, world / "sink")
    assert lost_records(done.config) == []
    assert AuditLog.check(done.config.audit_log)[0][-1]["do"] == "recover"
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

    def budget_told(path: Path) -> Any:
        config = load_site(path)
        ledger = PrivacyLedger(config.memory, "north", config.file.privacy)
        return budget_of(*((steps.noise_multiplier, steps.sample_rate, steps.steps) for steps in ledger.noisy_steps()))

    assert noted_spending(tmp_path / "spent.json", {"north": budget_told(world / "north" / "SITE.yaml")}) == ([], [])
    by_hand = site_with_budget(tmp_path / "by-hand")
    shutil.copytree(world / "memory-of-yesterday", by_hand.parent / "memory")
    assert lost_records(load_site(by_hand)) == []
    restored = tmp_path / "restored" / "SITE.yaml"
    restore(world / "yesterday.backup", restored, world / "sink-of-yesterday")
    for path in (by_hand, restored):
        warnings, (fault,) = noted_spending(tmp_path / "spent.json", {"north": budget_told(path)})
        assert not warnings
        assert "site restore" in fault
    whole = tmp_path / "whole" / "SITE.yaml"
    restore(world / "yesterday.backup", whole)
    assert noted_spending(tmp_path / "spent.json", {"north": budget_told(whole)}) == ([], [])


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
        with pytest.raises(FedshiftError, match=message) as error:
            restore(world / "yesterday.backup", tmp_path / f"north-{name}" / "SITE.yaml", tmp_path / name)
        assert "\n" not in str(error.value)
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
        with pytest.raises(FedshiftError, match="damaged") as error:
            restore(tmp_path / "b", tmp_path / "north" / "SITE.yaml")
        assert "\n" not in str(error.value)
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
    assert done.counted == ""
    assert len(AuditLog.check(done.config.audit_log)[0]) == 1


@pytest.mark.parametrize(("most", "fits"), [(200, True), (100, False)])
def test_all_files_of_a_backup_together_have_a_bound(
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
