"""What a reader finds of one domain, and what it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedshift.data.images import ImageFile
from fedshift.errors import UserError, nearest

Part = Literal["train", "test", ""]
"""The side of the official split, or "" where there is none."""


@dataclass(frozen=True)
class Samples:
    """The samples of one domain, in the order of its files."""

    # image files, uint8 images (n, channels, height, width) or float32 features (n, d)
    inputs: Sequence[ImageFile] | npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    # int64 (n,) class numbers; float32 (n, labels) of 0 and 1, or (n, 2) times and events; 0 beside masks
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    parts: tuple[Part, ...]  # the part of each sample (n)
    masks: tuple[tuple[ImageFile, ...], ...] = ()  # of image files, for each structure the file of each sample's mask

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Location:
    """Where a data set is read from."""

    folder: Path  # its folder
    domains: tuple[str, ...]  # the names of all, in the order of their numbers
    chosen: tuple[str, ...]  # those that are read
    classes: tuple[str, ...]  # their names, in order
    incomplete: bool  # whether a domain or a file may be missing
    how: str  # what to fetch, and how the folder must look, for messages

    def inside(self, name: str, named_in: Path) -> Path:
        """A file that a list names; it must be below the folder. UserError if it is not, as in a stranger's list."""
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise UserError(f"{named_in}: '{name}' is no file below {self.folder}: get this list again")
        return self.folder.joinpath(*parts)

    def missing(self, what: str) -> UserError:
        """The error for a file or folder that is not there."""
        return UserError(
            f"data.folder: {self.folder} has no {what}. {self.how}. Of a part of it write incomplete: allow"
        )

    def class_number(self, name: str, where: Path) -> int:
        """The number of a class. UserError if there is none of that name."""
        if name not in self.classes:
            raise UserError(f"{where}: '{name}' is no class of this data set; {nearest(name, self.classes)}")
        return self.classes.index(name)
