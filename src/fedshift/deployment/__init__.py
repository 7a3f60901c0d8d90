"""The same experiment across machines: what runs at the coordinator, and what runs at the sites."""
