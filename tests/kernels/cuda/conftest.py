"""Triton's kernels run in its interpreter here, on the CPU. It has to be said before the first of them is loaded."""

import os

os.environ["TRITON_INTERPRET"] = "1"
