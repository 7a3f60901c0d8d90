"""What goes with any method: a rule, a server's optimiser, plug-ins of local training, an average over rounds."""
