"""The format of finished runs in a few small files."""
