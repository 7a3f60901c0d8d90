"""Messages between machines: what they hold, how they are written, and what either side accepts."""
