"""Large content between processes of one machine: a file, which the receiver maps into memory.

A message copies its content several times on its way. A file is written once and read where it lies, and its receiver
removes it, or whoever removes the folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from fedshift.federation.messages import Content, decode_file, encode_file, pieces

LARGE = 1 << 16
"""Bytes of content from which a file is faster than a message."""


class ContentFiles:
    """The files that one process leaves for others.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from fedshift.weights import Weights
        >>> files = ContentFiles(Path(tempfile.mkdtemp()))
        >>> files.write({"weights": Weights({"w": torch.zeros(3)})}) is None
        True
        >>> file = files.write({"weights": Weights({"w": torch.zeros(20_000)})})
        >>> take(file)["weights"], Path(file).exists()
        (Weights(1 tensors, 80,000 bytes), False)
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder``: which the receivers see; None: no content is large, such as where files are encrypted."""
        self._folder, self._count = folder, 0

    def write(self, content: Mapping[str, Content]) -> str | None:
        """Write content to a new file, and return its path; None if it is small, or the disk has no room for it."""
        if self._folder is None or sum(size for _, _, size in pieces(content)) < LARGE:
            return None
        self._count += 1
        file = self._folder / f"content-{os.getpid()}-{self._count}"
        try:
            encode_file(file, content)
        except (OSError, SafetensorError):
            file.unlink(missing_ok=True)
            return None
        return str(file)


def take(file: str) -> dict[str, Content]:
    """Read the content of a file and remove it: its numbers stay in memory as long as they are used."""
    content = decode_file(Path(file))
    remove(file)
    return content


def remove(file: str) -> None:
    """Remove a file. Whoever has mapped it keeps it."""
    Path(file).unlink(missing_ok=True)
