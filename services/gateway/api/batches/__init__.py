"""OpenAI's endpoints for batches."""
