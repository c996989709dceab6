"""A scheduled batch becomes tensors, and its rows logits or embeddings."""
