"""What finished runs say in plain words, and what they leave open."""
