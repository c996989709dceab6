"""OpenAI's endpoints, and vLLM's about tokens."""
