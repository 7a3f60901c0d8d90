"""Logs whose lines are chained: every change within is named, and killed writers leave them whole."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from fedshift.deploy.chained_log import append_line, checked_lines, lines_of
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.kits import Kit, Project, load_kit
from fedshift.deploy.json_files import append_event, events_of
from fedshift.deploy.log_export import export_log, first_difference, verify_export
from fedshift.errors import FedshiftError, UserError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for number in range(4):
        append_line(tmp_path / "log", {"number": number, "text": "ü" * 40_000})
    return tmp_path / "log"


def test_lines_read_back_in_order(log: Path) -> None:
    assert [json.loads(line)["number"] for line in checked_lines(log)] == [0, 1, 2, 3]
    assert (stat.S_IMODE(log.stat().st_mode), checked_lines(log.parent / "absent")) == (0o600, [])


def test_the_first_line_that_does_not_fit_is_named(log: Path) -> None:
    lines = lines_of(log)
    other = lines[1].replace('"number": 1', '"number": 7')
    for spoiled, number in (
        ([lines[0], other, *lines[2:]], 2),
        ([*lines[:-1], lines[-1].replace('"number": 3', '"number": 7')], 4),
        ([lines[0], *lines[2:]], 2),
        ([*lines[:2], lines[0], *lines[2:]], 3),
        (["", *lines], 1),
        ([lines[0], "[]", *lines[2:]], 2),
    ):
        log.write_text("\n".join(spoiled) + "\n")
        with pytest.raises(FedshiftError, match=rf"line {number}: "):
            checked_lines(log)


def test_half_a_line_is_no_line(log: Path) -> None:
    """A process was killed while it wrote."""
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"half')
    assert len(checked_lines(log)) == 4
    append_line(log, {"number": 4}, known=len(whole))
    assert [json.loads(line)["number"] for line in checked_lines(log)] == [0, 1, 2, 3, 4]
    log.write_bytes(b'{"half')
    append_line(log, {"number": 0})
    assert len(checked_lines(log)) == 1


@pytest.mark.case("bit flips", "every bit of the last line of a log, and of its line break")
def test_a_flipped_bit_of_the_last_line_is_noticed(tmp_path: Path) -> None:
    """No line behind it has its digest. Without its line break it would count as half a line, and be lost."""
    log = tmp_path / "log"
    for number in range(2):
        append_line(log, {"steps": number})
    whole = log.read_bytes()
    begin = whole.index(b"\n") + 1
    for bit in range(8 * begin, 8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        log.write_bytes(data)
        with pytest.raises(FedshiftError, match="changed"):
            checked_lines(log)
        with pytest.raises(FedshiftError, match="changed"):
            append_line(log, {"steps": 2})
        assert log.read_bytes() == data


@pytest.mark.threat("cut_log")
def test_a_log_that_was_cut_is_not_gone_on_with(log: Path) -> None:
    size = log.stat().st_size
    log.write_text("\n".join(lines_of(log)[:3]) + "\n")
    with pytest.raises(FedshiftError, match="cut off"):
        append_line(log, {"number": 3}, known=size)


def test_writers_do_not_break_the_chain(tmp_path: Path) -> None:
    """Two jobs of a role write at the same time, such as one that ends and the next."""
    log = tmp_path / "log"

    def write(who: int) -> None:
        for number in range(50):
            append_line(log, {"who": who, "number": number})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checked_lines(log)) == 150


@pytest.mark.parametrize("since", [0, 1, 2])
def test_a_damaged_event_is_told_by_its_line_in_the_file(tmp_path: Path, since: int) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(4):
        append_event(path, {"what": "round", "round": number})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace("round", "rounds", 1), *lines[3:]]))
    told = [event["message"] for event in events_of(path, since) if event["what"] == "warning"]
    assert told == [f"{path}, line 3 is damaged, and not read"]
    assert len(list(events_of(path, since))) == 4 - since


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kit]:
    """The kits of two projects: north and the coordinator of one, a stranger's north of the other."""
    kits_by_name = {}
    for project in ("own", "other"):
        options = {"name": project, "contact": "a@example.org", "server": "localhost", "sites": ("north", "south")}
        made = roles.provision(Project.model_validate(options), tmp_path_factory.mktemp(project), lambda new: None)
        kits_by_name |= {f"{project} {name}": load_kit(kit) for name, kit in made.sites.items()}
        kits_by_name[f"{project} coordinator"] = load_kit(made.coordinator)
    return kits_by_name


@pytest.fixture
def audit_log(tmp_path: Path) -> Path:
    for number in range(5):
        append_line(tmp_path / "audit.jsonl", {"number": number})
    return tmp_path / "audit.jsonl"


def authority(kit: Kit) -> Path:
    return kit.flare / "startup" / "rootCA.pem"


@pytest.mark.parametrize("who", ["own north", "own coordinator"])
def test_an_export_says_whose_it_is(who: str, kits: dict[str, Kit], audit_log: Path, tmp_path: Path) -> None:
    assert export_log(audit_log, kits[who], "audit", tmp_path / "export") == 5
    export = verify_export(tmp_path / "export", authority(kits["own south"]), audit_log)
    assert (export.role, export.log) == (kits[who].role, "audit")
    assert (export.name, list(export.lines)) == ("north" if who == "own north" else "localhost", lines_of(audit_log))


@pytest.mark.threat("cut_log")
def test_the_first_line_that_was_touched_is_named(kits: dict[str, Kit], audit_log: Path, tmp_path: Path) -> None:
    file = tmp_path / "export"
    export_log(audit_log, kits["own north"], "audit", file)
    head, *lines = file.read_text().splitlines()
    other = lines[2].replace('"number": 2', '"number": 7')
    for spoiled, what in (
        ([*lines[:2], other, *lines[3:]], "line 3 was changed"),
        (lines[1:], "line 1 was removed"),
        ([*lines[:2], *lines[4:]], "line 3 was removed"),
        (lines[:4], "line 5 was removed"),
        ([*lines[:2], other, *lines[2:]], "line 3 was added"),
        ([*lines, other], "line 6 was added"),
        ([*lines[:4], other], "line 5 was changed"),
    ):
        file.write_text("\n".join([head, *spoiled]) + "\n")
        with pytest.raises(FedshiftError, match=what):
            verify_export(file, authority(kits["own north"]))


@pytest.mark.threat("cut_log")
def test_the_log_at_home_may_only_have_grown(kits: dict[str, Kit], audit_log: Path, tmp_path: Path) -> None:
    file = tmp_path / "export"
    export_log(audit_log, kits["own north"], "audit", file)
    append_line(audit_log, {"number": 5})
    assert len(verify_export(file, authority(kits["own north"]), audit_log).lines) == 5
    audit_log.write_text("\n".join(lines_of(audit_log)[:4]) + "\n")  # the chain of what is left is whole
    with pytest.raises(FedshiftError, match="line 5 was removed"):
        verify_export(file, authority(kits["own north"]), audit_log)


def test_a_signature_cannot_be_had_otherwise(kits: dict[str, Kit], audit_log: Path, tmp_path: Path) -> None:
    """The first line changed, another's certificate with it, another project's kit, another name."""
    file, root = tmp_path / "export", authority(kits["own north"])
    export_log(audit_log, kits["own north"], "audit", file)
    head, *lines = file.read_text().splitlines()
    foreign = tmp_path / "foreign"
    export_log(audit_log, kits["other north"], "audit", foreign)
    certificate = json.loads(foreign.read_text().splitlines()[0])["certificate"]
    for change in (
        {"digests": json.loads(head)["digests"][:4]},
        {"name": "south"},
        {"made": "2020-01-01T00:00:00+00:00"},
        {"certificate": certificate},
        {"signature": ""},
    ):
        file.write_text("\n".join([json.dumps({**json.loads(head), **change}), *lines]) + "\n")
        with pytest.raises(FedshiftError, match="signature"):
            verify_export(file, root)
    with pytest.raises(FedshiftError, match="signature"):
        verify_export(foreign, root)
    for text in ("", "{}", "[]", head[:-5]):
        file.write_text(text)
        with pytest.raises(FedshiftError, match="not that of an export"):
            verify_export(file, root)
    with pytest.raises(UserError, match=r"rootCA\.pem"):
        verify_export(foreign, audit_log)


@pytest.mark.threat("cut_log")
def test_no_site_signs_as_another(
    kits: dict[str, Kit], audit_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """South's key is of the same authority; with it south signs what it likes, but only as south."""
    south = kits["own south"]
    liar = Kit(south.folder, "site", "north", south.project)
    export_log(audit_log, liar, "audit", tmp_path / "export")
    with pytest.raises(FedshiftError, match="by 'north', and is signed by 'south'"):
        verify_export(tmp_path / "export", authority(south))


def test_a_broken_log_is_not_signed(kits: dict[str, Kit], audit_log: Path, tmp_path: Path) -> None:
    audit_log.write_text(audit_log.read_text().replace('"number": 1', '"number": 9'))
    with pytest.raises(FedshiftError, match="line 2: the log was changed"):
        export_log(audit_log, kits["own north"], "audit", tmp_path / "export")


def test_lines_in_another_order_are_named() -> None:
    from fedshift.deploy.chained_log import digest_of

    assert first_difference([digest_of(text) for text in "abc"], ["a", "c", "b"]) == "line 2 was removed"
