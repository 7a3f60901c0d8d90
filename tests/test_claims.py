"""Claims: one process has a folder, also where locks do not hold; who is silent for too long has lost it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift import claims
from fedshift.claims import Claim, ClaimLost, Machine, hold_claim, network_file_system, silence
from fedshift.errors import UserError

ELSEWHERE = Machine("server-2", "boot", "space")


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(claims.SILENCE, "0.4")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, briefly: None) -> Iterator[Claim]:
    """A claim of a process on another machine."""
    claim = Claim(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(claims, "machine", lambda: ELSEWHERE)
        assert claim.take()
    yield claim
    claim.release()


def fall_silent(claim: Claim) -> None:
    """As a process that is stopped, or whose machine is gone: no more signs of life."""
    claim._end.set()
    time.sleep(0.05)


def test_who_has_a_folder_keeps_it(far: Claim, tmp_path: Path) -> None:
    other = Claim(tmp_path)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert not other.take()
        far.check()
        time.sleep(0.05)
    assert other.is_alive()
    assert other.holder() == f"process {os.getpid()} on server-2"
    far.release()
    assert other.take()
    other.release()
    assert not list(tmp_path.iterdir())


def test_an_old_sign_says_nothing_of_now(far: Claim, tmp_path: Path) -> None:
    other = Claim(tmp_path)
    assert not other.take()
    time.sleep(0.1)  # it beats
    fall_silent(far)
    other.doubt()
    assert not other.take()
    assert not other.is_alive()


def test_a_silent_process_loses_it_and_notices(far: Claim, tmp_path: Path) -> None:
    fall_silent(far)
    other = Claim(tmp_path)
    assert not other.take()
    assert not other.is_alive()
    time.sleep(0.5)
    assert other.take()
    other.check()
    with pytest.raises(ClaimLost, match=f"process {os.getpid()} on .* seen no sign of this process for 0.4 seconds"):
        far.check()
    far.release()
    other.check()
    other.release()
    third = Claim(tmp_path)
    assert third.take()
    far._number = 1  # which is in use again
    with pytest.raises(ClaimLost):
        far.check()
    third.release()


def test_the_clock_of_another_machine_does_not_count(far: Claim, tmp_path: Path) -> None:
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    assert not Claim(tmp_path).take()


def test_one_of_many_takes_over(far: Claim, tmp_path: Path) -> None:
    fall_silent(far)
    rivals = [Claim(tmp_path) for _ in range(8)]
    assert not any(rival.take() for rival in rivals)
    time.sleep(0.5)
    begin, took = threading.Barrier(len(rivals)), []

    def try_it(rival: Claim) -> None:
        begin.wait()
        took.append(rival.take())

    threads = [threading.Thread(target=try_it, args=(rival,)) for rival in rivals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(took) == 1
    for rival in rivals:
        rival.release()


@pytest.mark.slow
def test_a_process_that_ended_here_is_noticed_at_once(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from fedshift.claims import Claim\n"
    code += "assert Claim(Path(sys.argv[1])).take(); print('taken', flush=True); time.sleep(60)"
    dead = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert dead.stdout.readline() == b"taken\n"
    other = Claim(tmp_path)
    assert not other.take()
    dead.send_signal(signal.SIGSTOP)
    assert not other.take()
    dead.kill()
    end = time.monotonic() + 10
    while not other.take():  # a zombie: nobody has waited for it
        assert time.monotonic() < end
        time.sleep(0.02)
    dead.wait()
    other.release()


def test_who_waits_gets_it_next(tmp_path: Path) -> None:
    path, order = tmp_path / "cache", []

    def work(name: str) -> None:
        with hold_claim(path, seconds=0.01) as claim:
            order.append(f"{name} begins")
            time.sleep(0.05)
            claim.check()
            order.append(f"{name} ends")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for begins, ends in zip(order[::2], order[1::2], strict=True):
        assert begins[0] == ends[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"machine": 3}', b"\xff" * 5000])
def test_a_file_that_is_no_claim_counts_as_one_until_it_was_silent(tmp_path: Path, briefly: None, text: bytes) -> None:
    (tmp_path / ".claim-000007").write_bytes(text)
    claim = Claim(tmp_path)
    assert not claim.take()
    assert claim.holder() == ""
    time.sleep(0.5)
    assert claim.take()
    assert [file.name for file in tmp_path.iterdir()] == [".claim-000008"]
    claim.release()


def test_another_version_s_claim_holds_while_it_changes(tmp_path: Path, briefly: None) -> None:
    file, claim, beat = tmp_path / ".claim-000001", Claim(tmp_path), 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        file.write_text(f'{{"version": 2, "signs": {beat}}}')
        beat += 1
        assert not claim.take()
        time.sleep(0.02)
    assert claim.is_alive()


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
def test_an_impossible_silence_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(claims.SILENCE, given)
    with pytest.raises(UserError, match=claims.SILENCE):
        silence()


WORK = """
import os, sys, time
from pathlib import Path
from fedshift import claims
from fedshift.claims import Claim, ClaimLost, Machine
claims.machine = lambda: Machine(f"machine-{os.getpid()}", "", "")  # each process on a machine of its own
folder, name = Path(sys.argv[1]), sys.argv[2]
claim, count = Claim(folder), 0
while count < 40:
    try:
        if not claim.take():
            time.sleep(0.02)
            continue
        log = folder / "log"
        done = max(map(int, log.read_text().split()), default=-1) + 1 if log.exists() else 0
        if done >= 40:
            break
        time.sleep(0.02)
        with open(log, "a") as file:
            claim.check()
            file.write(f"{done}\\n")
        try:
            claim.check()
        except ClaimLost:  # it was stopped between check and write
            with open(folder / f"late-{os.getpid()}-{done}", "w"):
                raise
    except ClaimLost:
        claim = Claim(folder)
claim.release()
"""


@pytest.mark.slow
def test_two_mounts_kills_and_pauses(two_mounts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty pieces of work by four processes of two mounts, which are stopped, continued and killed: none twice.

    A process that is stopped between its check and its write writes late, and finds that out at its next check.
    """
    assert all(network_file_system(mount) == "fuse" for mount in two_mounts)
    monkeypatch.setenv(claims.SILENCE, "1.5")  # FUSE may show what was a second ago

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WORK, str(two_mounts[number % 2]), str(number)])

    processes = [start(number) for number in range(4)]
    log = two_mounts[0] / "log"
    end = time.monotonic() + 120
    moments = 0
    while not (log.exists() and "39" in log.read_text().split()):
        assert time.monotonic() < end
        one = processes[moments % 4]
        moments += 1
        if moments % 3 == 0:
            one.kill()
            one.wait()
            processes[processes.index(one)] = start(moments)
        else:
            one.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            one.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    for one in processes:
        one.send_signal(signal.SIGCONT)
        one.wait(timeout=60)
    late = Counter(file.name.rpartition("-")[2] for file in two_mounts[0].glob("late-*"))
    written = Counter(log.read_text().split())
    assert written.keys() == {str(number) for number in range(40)}
    assert written - Counter(map(str, range(40))) <= late
