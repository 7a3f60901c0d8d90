"""What composes, one file each: whether what an experiment asks for goes with its data, network, sites and methods."""
