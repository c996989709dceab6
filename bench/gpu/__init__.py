"""What of the CUDA backend is right, and how fast it is, on this machine's GPU; without one, as far as Triton's interpreter can tell."""
