"""Compute owns what needs the whole vocabulary."""
