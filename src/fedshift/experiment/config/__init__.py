"""The experiment file: its sections, their defaults, and messages about mistakes in it."""
