"""Accuracy at a site without labels: estimates, their interval, and when to give none."""
