"""What replies of sites may hold, and how they are checked, in every engine alike."""
