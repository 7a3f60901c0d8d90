"""A whole federation on this machine, to attack: `fedshift security selftest` tries every promise on it."""
