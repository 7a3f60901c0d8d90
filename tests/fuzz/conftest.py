"""The tiny sites of the federation's tests serve these tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))
sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
