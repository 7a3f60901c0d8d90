"""What the processes of a federation on this machine use: memory and processor time, by role."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
