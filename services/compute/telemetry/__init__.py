"""Figures, spans and snapshots of compute."""
