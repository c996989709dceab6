"""Checks the CUDA backend and measures it, on this machine's GPU; without one, as far as Triton's
interpreter can tell.
"""
