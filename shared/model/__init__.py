"""Models (their files, GGUF included) and what a request asks of them: sampling parameters,
constraints, the decision."""
