"""Domains and how they are read: builders, checks, splits, augmentation, and a site's view of its samples."""
