"""`python -m services.compute.images.pixels FOLDER`: makes a model's inputs of images' files, in a
process of its own that can be killed.

FOLDER: the model's, with the configuration of the transformers library's image processor. A question
is a packed pair: options of the processor, and the file. The answer is the processor's output, arrays
by name, or Invalid.
"""

import os
import sys
from pathlib import Path
from typing import Any

from shared.model.vision.pixels import load_decoders, open_image
from shared.process.plain import unpack
from shared.process.worker import run_worker

MEMORY = 2 << 30  # of an image of the largest size in each of its forms


def load_processor(folder: Path) -> Any:
    """The library's processor that works on a CPU with Pillow."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules["torch"] = None  # type: ignore[assignment]  # the library would import it for nothing
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False, local_files_only=True)


def prepare(processor: Any, question: bytes) -> dict[str, Any]:
    options, data = unpack(question)
    found = processor(open_image(data), return_tensors="np", **options)
    return {name: found[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in found}


def main() -> None:
    processor = load_processor(Path(sys.argv[1]))
    load_decoders()
    run_worker(lambda question: prepare(processor, question), MEMORY)


if __name__ == "__main__":
    main()
