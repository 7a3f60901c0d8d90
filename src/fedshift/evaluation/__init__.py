"""Metrics, selection rules, the records of a run, and mean ± standard error over seeds."""
