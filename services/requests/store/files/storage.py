"""Storage: the bytes of files, in a folder or in any storage that fsspec knows. A file exists whole or
not at all.

Synchronous: asyncio callers run it in a thread.
"""

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shared.process.errors import StartupError, words_of
from shared.process.telemetry import get_logger

PIECE_BYTES = 1 << 20
UNFINISHED = ".part"  # in the name of what is being written
# no part is `..`, and none is a pattern to fsspec
PATH = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*(/[0-9A-Za-z_][0-9A-Za-z_.-]*)*")

log = get_logger("penstock.gateway")


class OutsideFolder(FileNotFoundError):
    """The path leads out of the storage's folder."""


class Storage:
    def __init__(self, url: str) -> None:
        """url: a folder, or file://, s3:// and others, whose options fsspec takes from its own
        configuration. Raises StartupError."""
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (OSError, ValueError, ImportError) as error:
            raise StartupError(f"--files-url {url}: {words_of(error)}") from None

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """A file to write to. It gets its name, `path`, when the block ends without an error."""
        whole = self._within(path)
        unfinished = f"{whole}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
        if isinstance(self.fs, LocalFileSystem):
            # no other user of this machine may read it; an existing folder keeps its mode
            os.makedirs(self.root, 0o700, exist_ok=True)
        self.fs.makedirs(whole.rpartition("/")[0], exist_ok=True)
        try:
            with self.fs.open(unfinished, "wb") as file:
                yield file
            self.fs.mv(unfinished, whole)
        except BaseException:
            with suppress(OSError):
                self.fs.rm_file(unfinished)
            raise

    def write(self, path: str, data: bytes) -> None:
        with self.writing(path) as file:
            file.write(data)

    def size(self, path: str) -> int:
        """The file's size in bytes. Raises FileNotFoundError."""
        return int(self.fs.info(self._within(path))["size"])

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes [start, end), all by default. Raises FileNotFoundError."""
        return bytes(self.fs.cat_file(self._within(path), start, end))

    def open(self, path: str) -> IO[bytes]:
        """Open the file to read. Raises FileNotFoundError."""
        file: IO[bytes] = self.fs.open(self._within(path), "rb")
        return file

    def names(self, folder: str) -> list[str]:
        """The names of a folder's complete files, sorted. None are in a folder that does not
        exist."""
        return [name for name, _ in self._listed(folder) if not name.endswith(UNFINISHED)]

    def remove(self, path: str) -> None:
        """A file, or a folder with all in it. Not there: fine."""
        with suppress(FileNotFoundError):
            self.fs.rm(self._within(path), recursive=True)

    def free_bytes(self) -> int | None:
        """Room on the disk that the folder is on; None where there is no telling."""
        if not isinstance(self.fs, LocalFileSystem):
            return None
        folder = self.root
        while not os.path.exists(folder):  # it is made with the first file
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free

    def abandoned(self, folder: str, after_s: float) -> list[str]:
        """The names of a folder's incomplete files that were not written to for so long."""
        return [
            name
            for name, info in self._listed(folder)
            if name.endswith(UNFINISHED) and time.time() - modified_at(info) > after_s
        ]

    def _within(self, path: str) -> str:
        """The whole path of what is in this storage. Raises OutsideFolder for a path that leads out
        of it, by its parts or by a link."""
        whole = f"{self.root}/{path}"
        is_within = PATH.fullmatch(path) is not None
        if is_within and isinstance(self.fs, LocalFileSystem):
            is_within = os.path.realpath(whole).startswith(f"{os.path.realpath(self.root).rstrip('/')}/")
        if not is_within:
            log.error("a path leads out of the files folder", path=path[:256])
            raise OutsideFolder(f"{path[:256]!r} is not in the files folder")
        return whole

    def _listed(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        try:
            self.fs.invalidate_cache()  # another process may have written there
            return sorted(
                ((info["name"].rpartition("/")[2], info) for info in self.fs.ls(self._within(folder), detail=True)),
                key=lambda each: each[0],
            )
        except FileNotFoundError:
            return []


def modified_at(info: dict[str, Any]) -> float:
    """When a file was written, as its file system says it; now, if that does not say."""
    found = info.get("mtime") or info.get("LastModified") or time.time()
    return float(found.timestamp() if hasattr(found, "timestamp") else found)
