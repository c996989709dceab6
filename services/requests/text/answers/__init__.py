"""Answers: an event of the token log becomes a delta, and the delta OpenAI's chunk or another
API's events."""
