"""Answers over HTTP: streams and bodies that any API sends."""
