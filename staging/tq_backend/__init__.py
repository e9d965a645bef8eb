"""`tq:`: TransferQueue on Ray behind a durable journal."""
