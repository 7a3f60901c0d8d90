"""The order of the tests, what a test may do that is not marked slow, and the worker processes that tests share."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from fedshift.federation.local.pool import WorkerPool

# The files of tests and of the package are compiled once, and not in every worker and process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until all is imported, as none of it is garbage

settings.register_profile("quick", max_examples=25, deadline=None)
settings.load_profile("quick")


WAITING = ("test_network.py", "test_network_apart.py", "test_selftest.py")
"""The files that wait for deployments most of the time: one worker runs them all, and the others compute meanwhile."""
LONGEST = (*WAITING, "test_options.py", "test_contract.py", "test_resume.py", "test_golden.py")
"""The files that take longest, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then all that start processes: at the end one worker would wait for them alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}

    def place(item: pytest.Item) -> tuple[int, bool]:
        first = LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        return first, item.path not in slow

    items.sort(key=place)


@functools.cache
def unit_of(file: Path) -> str:
    """What one worker runs: a file, all that wait for deployments, or all that share the two worker processes."""
    if file.name in WAITING:
        return "waiting"
    shares = re.search(r"\b(two_workers|shared_workers|pool: WorkerPool)\b", file.read_text(encoding="utf-8"))
    return "sharing" if shares else str(file)


class ByUnit(LoadFileScheduling):
    """``--dist loadfile`` where some files are run as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(Path(self.config.rootpath, super()._split_scope(nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return ByUnit(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Garbage is looked for less often, and not among the modules: that takes a tenth of the time of most tests."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that starts a Python process, itself or by a fixture, fails unless it is marked slow."""
    if item.get_closest_marker("slow") is not None:
        return (yield)

    def guarded(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(self: Any, *arguments: Any, **options: Any) -> Any:
            command = options.get("args", arguments[0] if arguments else None)
            program = command[0] if isinstance(command, list | tuple) else command
            if command is None or Path(str(program)).name.startswith("python"):
                pytest.fail(f"{item.nodeid} starts a process: mark it with @pytest.mark.slow")
            return start(self, *arguments, **options)

        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", guarded(subprocess.Popen.__init__))
        patch.setattr(BaseProcess, "start", guarded(BaseProcess.start))
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _disks_are_not_waited_for() -> Iterator[None]:
    """No test can tell whether a file has reached the disk, and thousands of small files take minutes to do so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _code_of_tests_is_trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Networks and methods that tests write need no question, but in tests of trust; nothing is remembered for you."""
    from fedshift import trust

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHIFT_CONFIG", str(tmp_path_factory.getbasetemp() / "config"))
        patch.setattr(trust, "allow", lambda code: None)
        yield


# Worker processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def two_workers() -> Iterator[WorkerPool]:
    """Two workers for all tests that compare engines. To start them takes longer than most of these tests."""
    from fedshift.federation.local.pool import WorkerPool

    started = WorkerPool(2, threads=1)
    yield started
    started.close()


@pytest.fixture
def pool(two_workers: WorkerPool) -> Iterator[WorkerPool]:
    """The two workers; this process has one thread, as each of them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield two_workers
    torch.set_num_threads(threads)


@pytest.fixture
def shared_workers(two_workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments with ``engine.workers: 2`` use the two workers, and leave them running.

    Not for runs that diverge: they close their workers in the middle of a mini-batch.
    """

    def shared(workers: int, threads: int, cards: Sequence[object] = ()) -> WorkerPool:
        assert (workers, threads) == (2, 1)
        return two_workers

    monkeypatch.setattr("fedshift.experiment.runs.context.WorkerPool", shared)
    monkeypatch.setattr(two_workers, "close", two_workers.forget)


@pytest.fixture
def two_mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one folder, between which flock does not exclude."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    back, *mounts = (tmp_path / name for name in ("back", "one", "two"))
    for folder in (back, *mounts):
        folder.mkdir()
    try:
        for mount in mounts:
            if subprocess.run(["bindfs", str(back), str(mount)], check=False).returncode:
                pytest.skip("bindfs cannot mount here")
        yield mounts[0], mounts[1]
    finally:
        for mount in mounts:
            subprocess.run(["fusermount", "-u", "-z", str(mount)], check=False)
