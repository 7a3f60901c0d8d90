"""The folders of helpers that these tests share with those of methods."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "federation"), str(TESTS / "methods" / "federated"), str(TESTS / "methods" / "pooled")]


@pytest.fixture
def double() -> Iterator[None]:
    """New modules and numbers are of float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
