"""Clocks that jump, by libfaketime: each process reads its distance from the true time from a file.

Monotonic clocks do not jump. In Debian: apt install faketime. On Linux only.
"""

from dataclasses import dataclass
from pathlib import Path

PLACES = (
    "/usr/lib/*/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
)


def find_library() -> Path | None:
    return next((found for place in PLACES for found in sorted(Path("/").glob(place.lstrip("/")))), None)


@dataclass(slots=True)
class Clocks:
    """One file a process, by its name, in `folder`."""

    folder: Path
    library: Path

    def environment(self, name: str) -> dict[str, str]:
        """Lets the process's clock be set."""
        if not self._file(name).exists():
            self.set(name, 0)
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, name: str, seconds: float) -> None:
        """Its clock goes so far ahead of the true time, within a second."""
        self.folder.mkdir(exist_ok=True)
        written = self._file(name).with_suffix(".new")
        written.write_text(f"{seconds:+.0f}\n")
        written.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self.folder / name
