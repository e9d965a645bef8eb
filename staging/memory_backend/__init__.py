"""`memory:`: the reference that the other backends are compared with."""
