"""The order of the tests, and what a test may do that is not marked slow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Federations of processes first: they wait a lot, and at the end one worker would wait for them alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


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
