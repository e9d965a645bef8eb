"""One model call from admission to its staged row."""
