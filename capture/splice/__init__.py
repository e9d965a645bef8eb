"""The structural splice: the suffix that a template prints after the last assistant turn."""
