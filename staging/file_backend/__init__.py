"""`file:`: SQLite for messages, files for big buffers, one Arrow file per sealed partition."""
