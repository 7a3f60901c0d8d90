"""Metrics, selection rules, the records of a run, and means with standard errors over seeds."""
