"""What a model is (its files, GGUF included) and what a request asks of it: sampling parameters,
constraints, the decision."""
