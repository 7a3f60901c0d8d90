"""The small data set can be imported, the command line called."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from calling import cli, one_thread  # noqa: F401
