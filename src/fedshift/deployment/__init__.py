"""The same experiment across machines: the coordinator's side and the sites'."""
