"""Benchmarks: a file a question. Each states its method and its ceiling, and ends with one line of JSON."""
