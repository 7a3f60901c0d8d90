"""The experiments' small data set and callable command line serve these tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiment"))

from calling import cli, one_thread  # noqa: F401
