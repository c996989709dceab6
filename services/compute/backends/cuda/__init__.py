"""Kernels in Triton, for NVIDIA GPUs; imported only where one is asked for, or by tests in Triton's
interpreter."""
