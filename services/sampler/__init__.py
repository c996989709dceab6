"""The sampler: draws tokens, makes their text, and writes the token logs."""
