"""Data sets: builders, checks, splits, augmentation, and the batches of a site."""
