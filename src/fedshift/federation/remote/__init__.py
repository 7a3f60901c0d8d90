"""Messages between machines: what is sent, how it is written, what either side accepts."""
