"""Secure aggregation: replies that are read only as a sum, and the masks that hide each of them."""
