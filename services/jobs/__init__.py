"""Batches: files of requests, answered in their own time. Celery's workers, on the same Redis."""
