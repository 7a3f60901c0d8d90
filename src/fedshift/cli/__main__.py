"""``python -m fedshift.cli``."""

from fedshift.cli import main

main()
