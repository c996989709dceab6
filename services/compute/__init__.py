"""Compute owns what needs the whole vocabulary."""

import os
import sys

from shared.wire.stage import LIFELINE

# How long a thread of the model spins for the others before it sleeps, in libgomp's own unit: some
# 0.2 ms, longer than the gaps between two kernels of a step. Its default of milliseconds is no
# faster on a quiet machine, and three times slower on a busy one: whoever spins keeps from the core
# the thread that is waited for. libgomp reads it when torch loads it, so it stands here, before any
# import of torch.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Bars are for terminals, and not for one that a launcher's stages share: there they would overwrite
# each other's lines. tqdm reads this when it is imported.
if not sys.stderr.isatty() or LIFELINE in os.environ:
    os.environ.setdefault("TQDM_DISABLE", "1")
