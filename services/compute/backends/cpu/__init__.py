"""Kernels in C++ for x86-64, and what they look like from Python."""
