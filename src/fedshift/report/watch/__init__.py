"""A page of running experiments, served to this machine."""
