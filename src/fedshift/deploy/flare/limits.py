"""Names and numbers that FLARE's processes and our commands share. Both import this file, so it imports nothing."""

LARGEST_FRAME = 8 << 20
"""Bytes of a frame between machines. FLARE sends what is longer than 1 MiB in parts of 1 MiB."""

RECONNECT = 2
"""Most seconds between a site's tries to reach a coordinator that does not answer."""

CERTIFICATES = "certificates.json"
"""A file in the coordinator's kit: name → the SHA-256 of its certificate, and whether it is revoked."""

LISTENER = "guarded"
"""The scheme of our listener, which FLARE reads as the coordinator's settings say."""

REFUSED_FOR = "is refused for"
"""What the listener's line says about a peer that reads no answers, after its name; the service reads it."""
