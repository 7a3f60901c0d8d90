"""How each task is measured."""
