"""A SLURM of two nodes on this machine, and the small data set of the experiments' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiment"))
sys.path.insert(0, str(Path(__file__).parent))

from calling import cli, one_thread  # noqa: F401
from two_nodes import slurm  # noqa: F401
