"""What is freed stays with the process: the kernel need not clear it anew for the next mini-batch."""

import ctypes
import sys

import numpy as np
import pytest

from fedshift.federation.local import allocator


def _new_pages() -> int:
    """How many pages five repetitions ask for, each of which frees ten blocks of 8 MiB together."""
    resource = pytest.importorskip("resource")
    before = 0
    for repetition in range(6):
        if repetition == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.ones(1 << 20) for _ in range(10)]
        del blocks
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt) - before


def test_blocks_that_were_freed_are_used_again_without_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator._CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    if not allocator.keep_freed_memory():
        pytest.skip("the C library is not GNU's")
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(allocator._MMAP_THRESHOLD, 128 << 10)  # as the library begins
    mallopt(allocator._TRIM_THRESHOLD, 128 << 10)
    without = _new_pages()
    allocator.keep_freed_memory()
    assert without > 1000  # of 2,048 small pages a block; of large pages there are fewer
    # The first blocks may need new pages, after whatever this process did before.
    assert min(_new_pages() for _ in range(3)) < without / 10


def test_who_set_the_librarys_own_variables_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert allocator.keep_freed_memory() is False


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for the library on Linux alone")
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() is False
