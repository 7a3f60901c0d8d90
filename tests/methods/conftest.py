"""The tiny sites of the federation's tests serve the methods' tests too, and helpers of one method those of all."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "federation"), str(HERE / "federated"), str(HERE / "pooled")]
