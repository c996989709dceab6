"""Helper processes: work on a client's text or image that may take too long, or too much memory."""
