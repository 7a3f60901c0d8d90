"""The experiment file, the protocol, the loop over methods, targets and seeds, run folders and resume."""
