"""Secure aggregation at a deployed site: whose certificate a key has, and what the site masks and unmasks."""
