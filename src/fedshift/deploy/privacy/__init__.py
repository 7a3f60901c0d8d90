"""A site's budget of differential privacy: what it has spent, and what it still answers."""
