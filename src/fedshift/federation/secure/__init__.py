"""What is read without its parts: sums of replies, as integers, and models that only their readers can open."""
