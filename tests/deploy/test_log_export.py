"""Signed exports of logs: who made them is certain, and the first line that was touched is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from fedshift.deploy.chained_log import append_line, lines_of
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.kits import Kit, Project, load_kit
from fedshift.deploy.log_export import export_log, first_difference, verify_export
from fedshift.errors import FedshiftError, UserError


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
def log(tmp_path: Path) -> Path:
    for number in range(5):
        append_line(tmp_path / "audit.jsonl", {"number": number})
    return tmp_path / "audit.jsonl"


def authority(kit: Kit) -> Path:
    return kit.flare / "startup" / "rootCA.pem"


@pytest.mark.parametrize("who", ["own north", "own coordinator"])
def test_an_export_says_whose_it_is(who: str, kits: dict[str, Kit], log: Path, tmp_path: Path) -> None:
    assert export_log(log, kits[who], "audit", tmp_path / "export") == 5
    export = verify_export(tmp_path / "export", authority(kits["own south"]), log)
    assert (export.role, export.log) == (kits[who].role, "audit")
    assert export.name == ("north" if who == "own north" else "localhost")
    assert list(export.lines) == lines_of(log)


@pytest.mark.threat("cut_log")
def test_the_first_line_that_was_touched_is_named(kits: dict[str, Kit], log: Path, tmp_path: Path) -> None:
    file = tmp_path / "export"
    export_log(log, kits["own north"], "audit", file)
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
def test_the_log_at_home_may_only_have_grown(kits: dict[str, Kit], log: Path, tmp_path: Path) -> None:
    file = tmp_path / "export"
    export_log(log, kits["own north"], "audit", file)
    append_line(log, {"number": 5})
    assert len(verify_export(file, authority(kits["own north"]), log).lines) == 5
    log.write_text("\n".join(lines_of(log)[:4]) + "\n")  # the chain of what is left is whole
    with pytest.raises(FedshiftError, match="line 5 was removed"):
        verify_export(file, authority(kits["own north"]), log)


def test_a_signature_cannot_be_had_otherwise(kits: dict[str, Kit], log: Path, tmp_path: Path) -> None:
    """The first line changed, another's certificate with it, another project's kit, another name."""
    file, root = tmp_path / "export", authority(kits["own north"])
    export_log(log, kits["own north"], "audit", file)
    head, *lines = file.read_text().splitlines()
    foreign = tmp_path / "foreign"
    export_log(log, kits["other north"], "audit", foreign)
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
        verify_export(foreign, log)


@pytest.mark.threat("cut_log")
def test_a_site_cannot_sign_as_another(
    kits: dict[str, Kit], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """South's key is of the same authority; with it south signs what it likes, but only as south."""
    south = kits["own south"]
    liar = Kit(south.folder, "site", "north", south.project)
    export_log(log, liar, "audit", tmp_path / "export")
    with pytest.raises(FedshiftError, match="by 'north', and is signed by 'south'"):
        verify_export(tmp_path / "export", authority(south))


def test_a_broken_log_is_not_signed(kits: dict[str, Kit], log: Path, tmp_path: Path) -> None:
    log.write_text(log.read_text().replace('"number": 1', '"number": 9'))
    with pytest.raises(FedshiftError, match="line 2: the log was changed"):
        export_log(log, kits["own north"], "audit", tmp_path / "export")


def test_lines_in_another_order_are_named() -> None:
    from fedshift.deploy.chained_log import digest_of

    assert first_difference([digest_of(text) for text in "abc"], ["a", "c", "b"]) == "line 2 was removed"
