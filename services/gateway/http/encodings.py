"""Content-Encoding: a body that came compressed, made plain piece by piece and never beyond the
bound, whatever it says it holds."""

import zlib

from shared.process.errors import Invalid

TAKEN = ("gzip", "deflate", "identity")
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32  # finds out by itself
RAW = -zlib.MAX_WBITS  # deflate, as some clients understand it


def decoder_for(header: str, max_bytes: int) -> "BodyDecoder | None":
    """Make a decoder for a request's Content-Encoding. None: the body is plain. Raises Invalid
    (415)."""
    names = [name for part in header.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in ("gzip", "x-gzip", "deflate"):
        message = f"Content-Encoding {', '.join(names)[:64]!r} is not taken, only {', '.join(TAKEN)}"
        raise Invalid(message, code="unsupported_content_encoding", status=415)
    return BodyDecoder(names[0], max_bytes)


class BodyDecoder:
    def __init__(self, name: str, max_bytes: int) -> None:
        """max_bytes: of what it makes."""
        self.name = name
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._inner = zlib.decompressobj(GZIP_OR_ZLIB)
        self._has_begun = False

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes. Raises Invalid: 413 beyond the bound, 400 for a broken stream."""
        if not self._has_begun and data:
            self._has_begun = True
            if self.name == "deflate" and data[0] & 0x0F != 8:  # no zlib header
                self._inner = zlib.decompressobj(RAW)
        made = bytearray()
        try:
            while data:
                if self._inner.eof:  # gzip may have several members
                    self._inner = zlib.decompressobj(GZIP_OR_ZLIB)
                made += self._inner.decompress(data, self.max_bytes - self.num_bytes - len(made) + 1)
                if self.num_bytes + len(made) > self.max_bytes:
                    raise Invalid(
                        f"the body, decoded, is longer than {self.max_bytes} bytes: send a shorter one", status=413
                    )
                data = self._inner.unconsumed_tail or self._inner.unused_data
        except zlib.error as error:
            raise Invalid(f"the body is not {self.name}: {error}", code="invalid_content_encoding") from None
        self.num_bytes += len(made)
        return bytes(made)

    def finish(self) -> None:
        """Raises Invalid for a body that was broken off."""
        if self._has_begun and not self._inner.eof:
            raise Invalid(f"the body is cut off: its {self.name} stream has no end", code="invalid_content_encoding")
