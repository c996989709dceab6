"""The ids that name files on disk. They are checked wherever they come from, Redis included: an id
with a slash or a dot would lead out of its folder."""

import re
import uuid

_FILE_ID = re.compile(r"file-[0-9A-Za-z_-]{1,64}")
_BATCH_ID = re.compile(r"(msg)?batch_[0-9A-Za-z_-]{1,64}")  # OpenAI's and Anthropic's


def is_file_id(value: object) -> bool:
    return isinstance(value, str) and _FILE_ID.fullmatch(value) is not None


def is_batch_id(value: object) -> bool:
    return isinstance(value, str) and _BATCH_ID.fullmatch(value) is not None


def unique_id() -> str:
    """An id that no process has made before: 32 characters."""
    return uuid.uuid4().hex
