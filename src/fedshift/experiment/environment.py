"""What results depend on besides the experiment file: the data's bytes, versions, the device, threads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from fedshift.data.domain import DataSet, SparseRows
from fedshift.federation.local.allocator import keep_freed_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def data_fingerprint(data: DataSet) -> str:
    """A checksum of all arrays of a data set. A run is not resumed on data with another checksum.

    It has 16 digits. If the data set has groups or its own split, a dash and 8 digits for these follow.
    """
    digest = hashlib.sha256(json.dumps([data.name, list(data.classes), list(data.domains)]).encode())
    for domain in data.domains.values():
        inputs = domain.inputs
        arrays = [inputs.data, inputs.indices, inputs.indptr] if isinstance(inputs, SparseRows) else [inputs]
        masks = [] if domain.masks is None else [domain.masks]
        for array in (*arrays, domain.labels, *masks):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    parted = [
        f"{domain.name} {name} {len(rows)} ".encode() + np.ascontiguousarray(rows, dtype=np.int64).tobytes()
        for domain in data.domains.values()
        for name, rows in (("groups", domain.groups), ("train", domain.train_rows), ("test", domain.test_rows))
        if rows is not None
    ]
    whole = digest.hexdigest()[:16]
    return f"{whole}-{hashlib.sha256(b''.join(parted)).hexdigest()[:8]}" if parted else whole


def versions() -> dict[str, str]:
    """The versions that results depend on, by package."""
    return dict(_versions())


@cache
def _versions() -> Mapping[str, str]:
    # Cached: every round needs them, and each look-up parses the packages' files.
    names = ("fedshift", "torch", "torchvision", "numpy")
    result = {"python": sys.version.split()[0]}
    for name in names:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "not installed"
    return result


@contextmanager
def threads_set(number: int) -> Iterator[None]:
    """Run a block with this many torch threads. Memory that is freed stays with the process, then and afterwards."""
    before = torch.get_num_threads()
    cudnn = torch.backends.cudnn
    torch.set_num_threads(number)
    keep_freed_memory()
    try:
        # Otherwise cuDNN may choose algorithms that add numbers in another order from run to run.
        with cudnn.flags(deterministic=True, benchmark=False, allow_tf32=cudnn.allow_tf32):
            yield
    finally:
        torch.set_num_threads(before)


class Usage:
    """Processor time and memory of this process from now on; its workers are other processes."""

    def __init__(self) -> None:
        self._began = time.process_time()
        with contextlib.suppress(OSError):  # on Linux a new peak begins; elsewhere it is not known
            _CLEAR.write_text("5", encoding="ascii")

    def seconds(self) -> float:
        """Processor seconds."""
        return time.process_time() - self._began

    def memory(self) -> int | None:
        """The most bytes that were in memory at a time; None where the system does not say."""
        try:
            peak = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return None
        return int(peak.split()[1]) << 10
