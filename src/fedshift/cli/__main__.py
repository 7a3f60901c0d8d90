"""``python -m fedshift.cli``."""

from fedshift.cli import main

if __name__ == "__main__":  # a file may name any module of fedshift, and importing it does nothing
    main()
