"""Ollama's bodies and lines."""
