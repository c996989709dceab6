"""Telemetry: metrics, the log line and the trace of each response."""
