"""Cryptography of deployed sites: keys, the protocol of masked sums at a site and at the server, sealed models."""
