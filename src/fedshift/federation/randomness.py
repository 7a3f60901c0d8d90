"""Random seeds that depend on names and not on the order of execution, so any number of workers gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fedshift.functional.secret_noise import SecretStream, Source


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from its purpose, such as ``derive_seed(experiment_seed, site, exchange, "batches")``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A generator seeded by `derive_seed`. It draws on the CPU, so every device gets the same batches."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def sources_of_round(sources: Sequence[str], number: int, seed: int, round_: int) -> tuple[str, ...]:
    """The ``number`` sources that are drawn for a round, in their order. It depends on the seed and the round alone."""
    chosen = torch.randperm(len(sources), generator=generator(seed, "sources of a round", round_))[:number]
    return tuple(sources[index] for index in chosen.sort().values.tolist())


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Draws:
    """The source of random numbers of a site's private training."""

    noise_multiplier: float  # σ
    # names the run and the site. No two runs have the same noise: the difference of two models with the same noise
    # would show what lies beneath it.
    stream: str
    # whether each batch's gradient is compared with that of its samples. A failure of this check, and so the error,
    # depends on samples.
    compares: ClassVar[bool] = True

    def generator(self, exchange: int, purpose: str) -> Source:
        """A source for one purpose in one exchange. A repeated exchange draws the same numbers again."""
        return generator(self.stream, exchange, "private", purpose)


@dataclass(frozen=True)
class SecretDraws(Draws):
    """The same from a secret of the site, which nobody else knows."""

    secret: bytes = field(default=b"", repr=False)
    compares: ClassVar[bool] = False

    def generator(self, exchange: int, purpose: str) -> Source:
        return SecretStream(self.secret, f"{self.stream}\x1f{exchange}\x1f{purpose}")
