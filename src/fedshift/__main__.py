"""``python -m fedshift``."""

from fedshift.cli import main

main()
