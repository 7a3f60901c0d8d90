"""The commands of a real federation: each one's options, and its work in a file of its own."""
