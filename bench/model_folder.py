"""The model that a benchmark runs on: a folder that is given, or one that is made for the run."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def model_folder(given: Path | None, shape: str) -> Iterator[Path]:
    """`given`; without it a folder of random weights of this shape, which is removed at the end."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / shape
        subprocess.run(
            [sys.executable, "-m", "services.operator.cli", "make-model", str(model), "--shape", shape], check=True
        )
        yield model
