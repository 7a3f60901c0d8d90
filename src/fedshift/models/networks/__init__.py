"""The networks that come with fedshift: one kind per file."""
