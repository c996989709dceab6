"""A GGUF file as a folder that the rest reads like any other checkpoint's: the JSON files that its
metadata amount to.

The folder lies in the user's cache and is made once. The weights stay where they are.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.model.gguf.config import make_config, make_generation_config, make_pooling
from shared.model.gguf.parts import parts_of, read_model
from shared.model.gguf.tokenizer import make_tokenizer, make_tokenizer_config
from shared.model.gguf.vision import read_mmproj
from shared.process.errors import StartupError

FORMAT = 8  # of what is written: counted up whenever the same file would give other JSON

UNUSED_S, RECENT_S = 90 * 24 * 3600, 24 * 3600
MAX_BYTES = 1 << 30
ASIDE = ".new-"  # what is still being written begins so


def unpack_metadata(path: Path) -> Path:
    """The folder with config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    1_Pooling/config.json of the file, which may be the first of several parts; and the
    chat_template.jinja that lies beside it, which goes before its own. Raises StartupError.

    It has the name of the files' identity (path, size and time), so that a file that was changed
    gets another. Written aside and renamed: whoever looks sees all of it or nothing.
    """

    template = path.with_name("chat_template.jinja")
    beside = (template,) if template.is_file() else ()

    def make() -> dict[str, Any]:
        head = read_model(path)
        return {
            "config.json": make_config(head),
            "generation_config.json": make_generation_config(head),
            "tokenizer.json": make_tokenizer(head),
            "tokenizer_config.json": make_tokenizer_config(head),
            "1_Pooling/config.json": make_pooling(head),
            **{each.name: _read(each) for each in beside},
        }

    return _unpacked((*parts_of(path), *beside), "", make)


def unpack_vision(mmproj: Path, hidden_size: int) -> Path:
    """The folder with config.json and preprocessor_config.json of an mmproj file. hidden_size: of the
    text's part that it belongs to. Raises StartupError."""
    names = ("config.json", "preprocessor_config.json")
    return _unpacked(
        (mmproj,), str(hidden_size), lambda: dict(zip(names, read_mmproj(mmproj, hidden_size), strict=True))
    )


def _unpacked(paths: tuple[Path, ...], other: str, make: Callable[[], dict[str, Any]]) -> Path:
    """A folder in the cache with what is made of these files, and of something else that names it."""
    path = paths[0]
    try:
        identity = " ".join([str(FORMAT), *map(_identity, paths), *([other] if other else [])])
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    folder = cache_folder() / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if (folder / "config.json").is_file():
        with contextlib.suppress(OSError):
            os.utime(folder)  # it is in use: see remove_unused
        return folder
    files = make()
    try:
        _write(folder, files)
        remove_unused(folder)
    except OSError as error:
        raise StartupError(
            f"{path}: its tokenizer can't be written to {folder.parent}: {error.strerror}; XDG_CACHE_HOME names "
            "another cache"
        ) from None
    return folder


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{template} can't be read: {error}") from None


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def cache_folder(of: str = "gguf") -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / of


def remove_unused(kept: Path) -> None:
    """Remove folders of files that were changed, moved or deleted: those that nobody has opened for
    UNUSED_S, and of more than MAX_BYTES the ones that were opened longest ago, but for those of the
    last day. kept: one that stays."""
    found = []
    for folder in kept.parent.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if folder != kept:
                found.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
    num_bytes, now = 0, time.time()
    for used_at, size, folder in sorted(found, reverse=True):
        num_bytes += size
        if now - used_at > (RECENT_S if num_bytes > MAX_BYTES or folder.name.startswith(ASIDE) else UNUSED_S):
            shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, files: dict[str, Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=folder.parent))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            aside.rename(folder)
    except OSError:
        # else another process was first: a folder is not renamed over one with files in it
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
