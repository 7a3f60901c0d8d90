"""Pictures in files of their own."""
