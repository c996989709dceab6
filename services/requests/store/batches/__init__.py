"""Batches in Redis: their records, their figures, their queue."""
