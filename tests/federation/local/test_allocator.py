"""What is freed stays with the process: the kernel need not clear it anew for the next mini-batch."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedshift.federation.local import allocator

NEW_PAGES = """
import resource, sys
import numpy as np
from fedshift.federation.local import allocator

allocator.LARGEST_BLOCK, allocator.MOST_KEPT = map(int, sys.argv[1:])

def new_pages():
    "How many pages five repetitions ask for, each of which frees ten blocks of 8 MiB together."
    for repetition in range(6):
        if repetition == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.ones(1 << 20) for _ in range(10)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = new_pages()
print(without, allocator.keep_freed_memory(), new_pages())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for the library on Linux alone")
def test_blocks_that_were_freed_are_used_again_without_new_pages() -> None:
    """In a process of its own: the heap of one that ran other tests may have no room to grow."""
    environment = {name: value for name, value in os.environ.items() if name not in allocator._CHOSEN_BY}
    words = [sys.executable, "-c", NEW_PAGES, str(allocator.LARGEST_BLOCK), str(allocator.MOST_KEPT)]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    without, kept, new = said.stdout.split()
    if kept != "True":
        pytest.skip("the C library is not GNU's")
    assert int(without) > 1000  # of 2,048 small pages a block; of large pages there are fewer
    assert int(new) < int(without) / 10


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for the library on Linux alone")
def test_the_limits_are_above_what_a_mini_batch_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator._CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    said: dict[int, int] = {}
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda what, to: said.update({what: to}) or 1)
    )
    assert allocator.keep_freed_memory()
    blocks = 10 * (8 << 20)
    assert said[allocator._MMAP_THRESHOLD] >= 8 << 20
    assert said[allocator._TRIM_THRESHOLD] >= blocks


def test_who_set_the_librarys_own_variables_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert allocator.keep_freed_memory() is False


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for the library on Linux alone")
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() is False
