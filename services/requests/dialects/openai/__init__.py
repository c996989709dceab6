"""OpenAI's chat completion, completion and embeddings: the requests that those of all APIs become."""
