"""How the C library hands memory to a process that trains: what is freed stays for the next mini-batch.

A mini-batch frees its activations and asks for as many bytes again a moment later. The GNU C library returns such
blocks to the system in between, so that the kernel has to clear every page anew: a quarter of the processor seconds of
a small convolutional network (benchmarks/speed.md). Results do not depend on it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""The numbers of two parameters in mallopt(3)."""
LARGEST_BLOCK = 32 << 20
"""Bytes up to which a block is kept: the most that the library allows."""
MOST_KEPT = 256 << 20
"""Freed bytes at the end of the heap above which they are returned."""
_CHOSEN_BY = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> bool:
    """Keep up to `MOST_KEPT` bytes of freed memory in this process, for as long as it lives.

    Whoever has set one of the C library's own variables has chosen already, and nothing changes.

    Returns whether it is kept now; False too where the C library is another, such as musl's, macOS's or Windows's.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _CHOSEN_BY):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
