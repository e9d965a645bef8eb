"""The parts of the store contract suite; `staging/testing.py` ships it."""
