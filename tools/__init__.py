"""The tokenplane command and its subcommands."""
