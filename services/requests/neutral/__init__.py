"""The neutral request: OpenAI's chat completion, completion and embeddings, which every API's
request becomes."""
