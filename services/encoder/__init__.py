"""The part of a model that sees, as a stage of its own: images to embeddings, for compute."""
