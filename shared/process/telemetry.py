"""Logging for people and machines: one line an event, `time level logger: event key=value …`, or
the same as a JSON object."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


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
        """Log with the traceback of the exception being handled: for our own mistakes, never for
        bad input."""
        self._log(logging.ERROR, event, values, exc_info=True)

    def _log(self, level: int, event: str, values: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s%s", event, Values(values), exc_info=exc_info)


class Values(dict[str, Any]):
    """An event's fields, as the rest of a line for people. None is a
    dash."""

    def __str__(self) -> str:
        return "".join(f" {key}={_plain(value)}" for key, value in self.items())


class JsonFormatter(logging.Formatter):
    """Log lines for machines: an object a line. Numbers stay numbers, what is missing is null, a
    traceback is a string."""

    def __init__(self, rank: int = 0) -> None:
        """rank: of the process in its group, which each line names unless it is 0."""
        super().__init__()
        self._place = {"rank": rank} if rank else {}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event, values = record.getMessage(), Values()
        if isinstance(record.args, tuple) and record.args and isinstance(record.args[-1], Values):
            event, values = str(record.args[0]), record.args[-1]
        own = {"time": time, "level": record.levelname.lower(), "logger": record.name, **self._place, "event": event}
        fields = {**own, **values, **own}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    text = str(value) if not isinstance(value, float) else f"{value:.6g}"
    return repr(text) if not text or not text.isprintable() or any(character.isspace() for character in text) else text


def get_logger(name: str) -> EventLogger:
    return EventLogger(name)


def setup_logging(level: str, log_format: LogFormat = "text", rank: int = 0) -> None:
    """Send Penstock's events to standard error; other libraries' from warnings up. rank: of a
    process that is not the first of its group: each line names it."""
    handler = logging.StreamHandler(sys.stderr)
    who = f" of rank {rank}" if rank else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s %(name)s{who}: %(message)s")
    handler.setFormatter(JsonFormatter(rank) if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("penstock").setLevel(level.upper())
