"""Leakage audits: attacks that reconstruct a site's samples from what it sends."""
