"""The parts of the engine contract suite; `engine_adapter/testing.py` ships it."""
