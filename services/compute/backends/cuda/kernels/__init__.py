"""The kernels themselves, in Triton's language: it looks like Python and has types of its own. What
launches them is in the folder above."""
