"""`tokenplane bench`."""
