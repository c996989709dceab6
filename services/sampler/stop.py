"""Stop strings, across token borders: text is held back for as long as it may be the beginning of
one."""


class StopMatcher:
    """Feeds on a sequence's text and releases what can no longer be part of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may go to the client now, and the stop string that ended it, if one did.
        Nothing is fed after a match."""
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            released, self._held = self._held[:at], ""
            return released, stop
        keep = self._longest_beginning()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, None

    def flush(self) -> str:
        """Release what is still held, once no more text can come."""
        released, self._held = self._held, ""
        return released

    def _longest_beginning(self) -> int:
        """The length of the longest end of the held text that begins a stop string; at most the
        longest stop less one."""
        for length in range(min(len(self._held), max(map(len, self.stops), default=1) - 1), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
