"""Images: their files to pixels, pixels to embeddings, and the sequences that wait for those."""
