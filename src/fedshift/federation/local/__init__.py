"""Engines on this machine: sites in this process, or in a pool of worker processes."""
