"""Seeds that depend on names, never on the order of execution: the reason why any number of workers gives the same
weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from what it is for, e.g. ``derive_seed(experiment_seed, site, exchange, "batches")``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `derive_seed`. Draws are made on the CPU so that every device sees the same batches."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside, PyTorch's CPU generator starts at ``seed``; afterwards it stands where it stood."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        yield
