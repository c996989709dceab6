"""The sampler owns what needs the request."""
