"""Secure aggregation at a deployed site: whose certificate signed a key, and what the site masks and unmasks."""
