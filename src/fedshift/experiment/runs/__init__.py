"""Running an experiment: its loop, one run, a run's folder, processes side by side."""
