"""Several workers behind one base URL: Ray actors under Ray Serve, one staging store."""
