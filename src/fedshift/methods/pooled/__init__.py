"""Baselines that need all data in one place; never deployable. Their ledger says that raw data left the sites."""
