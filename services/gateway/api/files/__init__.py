"""OpenAI's endpoints for files."""
