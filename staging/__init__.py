"""The staging store contract and its backends."""
