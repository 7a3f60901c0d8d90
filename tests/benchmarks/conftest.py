"""The benchmarks' own modules, and the callable command line, serve these tests."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "experiment"), str(TESTS.parent / "benchmarks")]

from calling import one_thread  # noqa: E402, F401

if not (TESTS.parent / "benchmarks").is_dir():  # a source distribution has none
    collect_ignore_glob = ["*"]
