"""For other tools: model cards, experiment trackers."""
