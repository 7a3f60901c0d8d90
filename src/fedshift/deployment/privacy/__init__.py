"""A site's budget of differential privacy: what it has spent, what it still answers, what the coordinator foresees."""
