"""Methods whose data stay at their sites."""
