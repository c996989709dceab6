"""Texts: what a model wrote, parsed; schemas of what it has to write; answers made of both."""
