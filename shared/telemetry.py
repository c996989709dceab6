"""Logging for people and machines: one line an event, `time level logger: event key=value …`."""

import logging
import sys
from typing import Any


class EventLogger:
    """log.info("request finished", request_id=…, num_tokens=…)"""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **values: Any) -> None:
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._log(logging.ERROR, event, values)

    def exception(self, event: str, **values: Any) -> None:
        """With the traceback of the exception being handled: for our own mistakes, never for bad input."""
        self._log(logging.ERROR, event, values, exc_info=True)

    def _log(self, level: int, event: str, values: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s%s", event, "".join(f" {key}={_plain(value)}" for key, value in values.items()), exc_info=exc_info)


def _plain(value: Any) -> str:
    text = str(value) if not isinstance(value, float) else f"{value:.6g}"
    return repr(text) if not text or any(character.isspace() for character in text) else text


def get_logger(name: str) -> EventLogger:
    return EventLogger(name)


def setup_logging(level: str) -> None:
    """Send Penstock's events to standard error; other libraries' from warnings up."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("penstock").setLevel(level.upper())
