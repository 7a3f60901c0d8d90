"""Networks: what all of them have, those that come with fedshift, and those of users."""
