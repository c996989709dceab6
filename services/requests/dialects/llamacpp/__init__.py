"""The bodies of llama.cpp's server."""
