"""How a vocabulary writes its tokens: the text and the bytes of each by itself."""

import json
import re
from functools import cache
from typing import Any

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback


class TokenTable:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of the package tokenizers."""
        self._tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        decoder = json.dumps(described.get("decoder"))
        self._is_byte_level, self._has_byte_tokens, self._has_metaspace = (
            each in decoder for each in ('"ByteLevel"', '"ByteFallback"', '"\\u2581"')
        )
        self._added = {each["id"] for each in described["added_tokens"]}
        self.describe = cache(self._describe)  # bounded by the vocabulary

    def _describe(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, and its bytes. A token that is a part of a character only is spelt as
        OpenAI's completions do: `bytes:\\xe6\\xb0`."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own, from how the vocabulary writes it; what has no such form, as it
        decodes."""
        token: Any = self._tokenizer.id_to_token(token_id)
        if token is not None and token_id not in self._added:
            alphabet = byte_of_character()
            if self._is_byte_level and all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            if self._has_metaspace:
                return str(token).replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


@cache
def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2's tokenizer (Radford et al. 2019): each byte as a printable
    character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + number): byte for number, byte in enumerate(others)},
    }
