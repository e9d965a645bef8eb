"""`tokenplane inspect`."""
