"""Files: their records in Redis, and where their contents lie."""
