"""Prompt modules: texts that prompts are put together from, each with a place of its own."""
