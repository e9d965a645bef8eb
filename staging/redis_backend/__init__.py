"""`redis:` and `rediss:`: one script per put, token columns apart from the rest."""
