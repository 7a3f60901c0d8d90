"""The tiny CLIP of the federation's tests serves the networks' tests, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))
