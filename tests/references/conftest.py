"""The folders of helpers that these tests share with those of methods."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "federation"), str(TESTS / "methods" / "federated"), str(TESTS / "methods" / "pooled")]
