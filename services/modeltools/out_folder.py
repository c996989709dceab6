"""The folder that a tool writes a model to: what is there already stays, unless --force says
otherwise, and readers see a whole model or none."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shared.model.files import ModelFiles
from shared.process.errors import StartupError, words_of

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")  # as a folder's readers find them
MODEL = "model.safetensors"
UNFINISHED = f"{MODEL}.unfinished"


def open_out_folder(out: Path, *, force: bool, source: ModelFiles | None = None) -> None:
    """Make it, or check that it can be written. Raises StartupError if a model is there, without
    force, or if it is the folder of the source, which is read."""
    if source is not None:
        place = source.weights.parent if source.weights.is_file() else source.weights
        if out.resolve() in (source.folder, place):
            raise StartupError(f"{out}: the model is read from there; what is written needs a folder of its own")
    try:
        if out.exists() and not out.is_dir():
            raise StartupError(f"{out} is a file: a model is written to a folder")
        old = find_weights(out)
        if old and not force:
            raise StartupError(f"{out}: {old[0].name} is there already; --force replaces it, or give another folder")
        out.mkdir(parents=True, exist_ok=True)
        (out / UNFINISHED).touch()
    except OSError as error:
        raise StartupError(f"{out}: {error.strerror}") from None


def find_weights(folder: Path) -> list[Path]:
    return [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]


def write_model(out: Path, tensors: dict[str, torch.Tensor], write_config: Callable[[], None]) -> int:
    """Write weights, and with `write_config` the other files, over older ones. Returns
    the bytes of the weights' file. Raises StartupError.

    The weights have their name last, and older ones go before config.json changes: there is never
    one model's config.json with another's weights.
    """
    aside = out / UNFINISHED
    try:
        save_file(tensors, aside, metadata={"format": "pt"})
        umask = os.umask(0o077)
        os.umask(umask)
        # like its neighbours: safetensors writes files that only their owner can read
        aside.chmod(0o666 & ~umask)
        for old in find_weights(out):
            old.unlink()
        write_config()
        return aside.rename(out / MODEL).stat().st_size
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise StartupError(f"{out}: the model can't be written: {words_of(error)}") from None
