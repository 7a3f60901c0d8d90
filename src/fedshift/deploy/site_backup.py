"""A site's backup, in one file, and how it is put back without spending any of its budget of privacy a second time.

A backup holds SITE.yaml, the kit with its private key, and the site's records: audit log, ledger, secret, what it
agreed to, sets of sites. It holds neither data nor the memory of runs that are under way. An older ledger in place of
the newest one would let the site spend again what it has spent since. So records that are there, and go on from those
of the backup, stay. Where they are lost, all that the site may have answered since the backup counts as spent: what the
newest copy of the audit log tells, and one exchange more; without a copy the whole budget.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedshift.deploy.chained_log import checked_lines, lines_of
from fedshift.deploy.privacy.ledger import LEDGER, PrivacyLedger, lost_records
from fedshift.deploy.remote.policy import RECOVERED, AuditLog, end_file
from fedshift.deploy.secure.site_seals import KEPT
from fedshift.deploy.site_file import SiteConfig, load_site
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.files import write_bytes

SITE_FILE, HEAD = "SITE.yaml", "backup.json"
_KIT = ("kit.json", "flare/startup/*", "flare/local/*")
_MOST_BYTES = 1 << 30
_CHAINED = {"audit.jsonl", LEDGER}


@dataclass(frozen=True)
class Restored:
    """What came of a restore."""

    config: SiteConfig
    written: tuple[Path, ...]  # files that were put back
    kept: tuple[Path, ...]  # files that were there and stay
    counted: str  # what counts as spent, in words; empty if nothing had to


def back_up(config: SiteConfig, out: Path) -> int:
    """Write a site's backup, encrypted if a key is set, while its service does not run; return how many files it holds.
    UserError if the site's records are not whole, or the backup cannot be written."""
    if lost := lost_records(config):
        raise UserError(lost[0])
    head = {"fedshift_backup": 1, "site": config.file.site, "made": time.time()}
    files = {HEAD: json.dumps(head).encode(), SITE_FILE: config.path.read_bytes()}
    kit = sorted(path for pattern in _KIT for path in config.kit.glob(pattern) if path.is_file())
    files |= {f"kit/{path.relative_to(config.kit)}": path.read_bytes() for path in kit}
    files |= {f"memory/{path.relative_to(config.memory)}": path.read_bytes() for path in _records(config.memory)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    write_private(out, packed.getvalue())
    return len(files) - 1


def restore(backup: Path, path: Path, newest: Path | None = None) -> Restored:
    """Put a site back. What is there and is not older stays.

    UserError if the backup is of another site or unreadable, or a copy is older than it; FedshiftError if records are
    there that do not go on from the backup's, nor the backup's from them. ``newest``: the newest copy of the audit log,
    where the site's own is lost: of a file sink, or a signed export.
    """
    files, site = _unpack(backup)
    if not path.exists():
        write_bytes(path, files[SITE_FILE], private=True)
    config = load_site(path)
    if config.file.site != site:
        raise UserError(f"{backup} is of site '{site}', and {path} of '{config.file.site}'")
    targets, records = (
        {root / name.removeprefix(below): data for name, data in files.items() if name.startswith(below)}
        for root, below in ((config.kit, "kit/"), (config.memory, "memory/"))
    )
    behind = {file for file, data in records.items() if file.name in _CHAINED and _is_older(file, data)}
    if config.audit_log in behind:
        behind.add(end_file(config.audit_log))
    ledger_was_there = (config.memory / LEDGER).exists() and config.memory / LEDGER not in behind
    written = []
    copied = _checked_copy(newest, records.get(config.audit_log, b"")) if newest is not None else None
    for file, data in {**targets, **records}.items():
        if not file.exists() or file in behind:
            write_bytes(file, data, private=True)
            written.append(file)
    if copied is not None and config.audit_log in written:
        write_bytes(config.audit_log, copied, private=True)
        end_file(config.audit_log).unlink(missing_ok=True)
    staying = tuple(file for file in (*targets, *records) if file not in written)
    counted = "" if ledger_was_there else _count_spent(config, complete=copied is not None)
    return Restored(config, tuple(written), staying, counted)


def _records(memory: Path) -> list[Path]:
    """The files of the memory that are no run's, and keys of sealed models that are kept for after their run."""
    files = [path for path in memory.glob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted([*files, *(path for path in memory.glob(f"{KEPT}/**/*") if path.is_file())])


def _unpack(backup: Path) -> tuple[dict[str, bytes], str]:
    """The files of a backup, by name, and whose it is."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(read_private(backup)), mode="r:gz") as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                if not _is_plain(entry) or content is None or sum(map(len, files.values())) + entry.size > _MOST_BYTES:
                    raise ValueError
                files[entry.name] = content.read()
        head = json.loads(files[HEAD])
        site = str(head["site"])
        if head["fedshift_backup"] != 1 or SITE_FILE not in files:
            raise ValueError
    except OSError as error:
        raise UserError(f"cannot read {backup}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, ValueError, KeyError, TypeError):
        raise UserError(f"{backup} is damaged, or is no backup of a site (fedshift site backup)") from None
    return files, site


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Whether an entry is a file of one of the folders that a backup has, and of nowhere else."""
    parts = PurePosixPath(entry.name).parts
    known = entry.name in (HEAD, SITE_FILE) or parts[:1] in (("kit",), ("memory",))
    return entry.isreg() and known and ".." not in parts and not entry.name.startswith("/")


def _is_older(file: Path, data: bytes) -> bool:
    """Whether a log that is there lacks lines at its end that the backup has."""
    if not file.exists():
        return False
    here, there = lines_of(file), data.decode(errors="replace").split("\n")[:-1]
    shared = min(len(here), len(there))
    if here[:shared] != there[:shared]:
        raise FedshiftError(
            f"{file} is another log than the backup's: neither goes on from the other; keep the one that is there, or "
            "move it away if it is not this site's"
        )
    return len(here) < len(there)


def _checked_copy(newest: Path, backup: bytes) -> bytes:
    """The audit log in the newest copy of it, whose chain is whole and which goes on from the backup's."""
    try:
        lines = list(_copied_lines(newest.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read {newest}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{newest} is no whole copy of an audit log: give the file of a file sink, or a signed export"
        ) from None
    data = "".join(f"{line}\n" for line in lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / newest.name
        log.write_bytes(data)
        checked_lines(log, "give another copy")
    if not data.startswith(backup):
        raise UserError(f"{newest} is older than the backup, or of another log: it does not go on from the backup's")
    return data


def _copied_lines(text: str) -> Iterator[str]:
    """The lines of a log, of a copy that a sink made of it, or of a signed export."""
    last = 0
    for line in text.splitlines():
        result = json.loads(line)
        if "fedshift_log" in result:
            continue
        if "from" not in result or "log" not in result:
            yield line
        elif result["log"] == "audit" and result["number"] > last:  # one that arrived twice is passed over
            last += 1
            if result["number"] != last:
                raise ValueError
            yield str(result["line"])


def _count_spent(config: SiteConfig, *, complete: bool) -> str:
    """Count what the site may have answered since the backup as spent."""
    if config.file.privacy is None and not (config.memory / LEDGER).exists():
        return ""
    log = AuditLog(config.audit_log)
    answers: Sequence[Mapping[str, object]] = [json.loads(line) for line in lines_of(config.audit_log)]
    ledger = PrivacyLedger(config.memory, config.file.site, config.file.privacy)
    ledger.count_since(answers, everything=not complete)
    log.append(do=RECOVERED, done=["restored from a backup"], rosters=log.rosters, ledger={"lines": ledger.lines()})
    if not complete:
        return "all of the budget, as nothing says what was answered since the backup"
    return f"what the copy of the audit log tells, and one exchange more: ε = {ledger.epsilon():.3g} in all"
