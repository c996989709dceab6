"""Images that go with a question: files, as data URLs."""

import base64
from pathlib import Path

from shared.process.errors import StartupError

MAX_BYTES = 20 << 20  # as the server's
KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # by how their files begin


def read_image(path: str) -> str:
    """The image in a file as a data URL. Raises StartupError."""
    file = Path(path).expanduser()
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_BYTES else b""
    except (OSError, RuntimeError) as error:
        raise StartupError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if size > MAX_BYTES:
        raise StartupError(f"{path}: an image has at most {MAX_BYTES >> 20} MiB")
    kind = next((kind for start, kind in KINDS.items() if data.startswith(start)), None)
    if kind is None:
        raise StartupError(f"{path}: no PNG, JPEG, WebP or GIF")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
