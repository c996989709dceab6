"""A pytest plugin: this machine's instruction sets are Arm's, out of the library that the environment names."""

import os
from pathlib import Path

from services.compute.backends.cpu import build

LIBRARY = "PENSTOCK_TEST_ARM_LIBRARY"

# before library.py and the tests' conftest.py take them from there
if LIBRARY in os.environ:
    build.INSTRUCTION_SETS, build.LIBRARY = build.ARM, Path(os.environ[LIBRARY])
