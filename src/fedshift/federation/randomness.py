"""Random seeds that depend on names and not on the order of execution, so any number of workers gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from its purpose, such as ``derive_seed(experiment_seed, site, exchange, "batches")``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A generator seeded by `derive_seed`. It draws on the CPU, so every device gets the same batches."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        yield
