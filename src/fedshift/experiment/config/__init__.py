"""The experiment file: its sections, their defaults, and what is said of mistakes in it."""
