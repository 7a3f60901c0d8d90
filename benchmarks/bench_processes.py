"""Federations that a benchmark plays on this machine: the code that they trust, the memory and time that they use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def trust_module(name: str, folder: Path) -> None:
    """The method of a benchmark is imported by all processes that this one starts from now on.

    They look for it beside this file, and trust it by a list in ``folder``; the user's own list stays as it is.

    Args:
        name: the method, ``module:Class``.
        folder: where the list lies; it outlives the processes.
    """
    from fedshift import trust
    from fedshift.import_paths import package_source

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["FEDSHIFT_CONFIG"] = str(folder / "config")
    trust.remember(trust.Code(f"method '{name}'", *package_source(name.partition(":")[0])))


def processes(folder: Path) -> Iterator[tuple[str, Any]]:
    """``(what it is, process)`` of everything that works below a folder."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        kit = next((word for word in words if word.startswith(str(folder))), None)
        if kit is None:
            continue
        role = "coordinator" if "/coordinator" in kit else f"site {Path(kit).relative_to(folder).parts[1]}"
        kinds = {
            "flare.service": "service",
            "runner_process": "job",
            "worker_process": "job",
            "server_train": "FLARE",
            "client_train": "FLARE",
        }
        what = next((kind for part, kind in kinds.items() if any(part in word for word in words)), "other")
        try:
            process.memory_info()
        except psutil.Error:
            continue
        yield f"{role}, {what}", process


def memory_of(process: Any) -> tuple[float, float]:
    """The largest resident memory that a process ever had, and what it has for itself now, in MB."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
        return sizes["VmHWM"], sizes["RssAnon"]
    except (OSError, KeyError):  # it has ended, or this is not Linux
        import psutil

        try:
            size = process.memory_info().rss / 1e6
        except psutil.Error:
            size = 0.0
        return size, size


def usage(folder: Path, seconds: float) -> dict[str, Any]:
    """Memory and share of one core of every process while nothing is asked of it."""
    before = {process.pid: (name, process, sum(process.cpu_times()[:2])) for name, process in processes(folder)}
    time.sleep(seconds)
    return {
        name: {
            "memory_mb": round(process.memory_info().rss / 1e6),
            "cpu_percent": round(100 * (sum(process.cpu_times()[:2]) - used) / seconds, 1),
        }
        for name, process, used in sorted(before.values(), key=lambda row: row[0])
        if process.is_running()
    }
