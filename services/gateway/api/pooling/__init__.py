"""vLLM's, Cohere's and Jina's endpoints for vectors and scores of texts."""
