"""The generation worker: its parts, its configuration, its lifecycle."""
