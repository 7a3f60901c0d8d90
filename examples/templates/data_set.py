"""A data set of your own: ``data: {name: "data_set.py:Sites", folder: clinic}`` in an experiment file.

It runs as it stands. A data set that comes with fedshift derives from ``DataSource``, as
``fedshift/data/builders/ghifary.py`` does.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedshift import OwnData


class Sites(OwnData):
    """One file ``SITE.npz`` for each site, with inputs ``x`` (n, d) and labels ``y`` (n,)."""

    folder: Path  # relative to the experiment file
    options: ClassVar = {"standardise": True}  # fields of the data set arrays

    def read(self):
        """Site → inputs and labels."""
        return {file.stem: (np.load(file)["x"], np.load(file)["y"]) for file in sorted(self.folder.glob("*.npz"))}
