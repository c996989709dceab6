"""Images: their files to pixels, pixels to embeddings, and who waits for those."""
