"""Helper processes: work on the text of a client that may take too long, or too much memory."""
