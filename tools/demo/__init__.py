"""`tokenplane demo`."""
