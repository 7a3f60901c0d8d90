"""Published data sets: a manifest for each in ``manifests/``, and a reader for each layout of files."""
