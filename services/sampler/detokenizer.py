"""Token ids to text as they come, never half a character."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shared.process.errors import StartupError
from shared.wire.logprobs import PromptLogprobs

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback
# tokens without text; a character of four bytes needs four. Beyond, the bytes will never be one:
# decode them as they are
MAX_PENDING = 8


def load_tokenizer(folder: Path, known_as: Path | None = None) -> Tokenizer:
    """The fast tokenizer of a checkpoint folder. known_as: the file, to the user, by default that
    in the folder. Raises StartupError."""
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises bare Exception
        raise StartupError(f"{known_as or file}: the tokenizer can't be loaded: {error}") from None


class Detokenizer:
    """One sequence's text. Seeded with the last prompt tokens: some decoders treat the first token
    of a text differently."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._stream = DecodeStream(ids=prompt_tail, skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # bare, from Rust: "invalid prefix", when a later token changes the text of earlier ones
            return self._restart()
        if text is not None:
            self._pending.clear()
            return str(text)
        return self._restart() if len(self._pending) >= MAX_PENDING else ""

    def flush(self) -> str:
        """The text of the tokens that still wait for more; incomplete bytes become U+FFFD."""
        return self._restart() if self._pending else ""

    def _restart(self) -> str:
        text = str(self._tokenizer.decode(self._pending, skip_special_tokens=self._skips))
        self._stream = DecodeStream(ids=self._pending, skip_special_tokens=self._skips)
        self._pending = []
        return text


class TokenTable:
    """The text and the bytes of single tokens, for logprobs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        decoder = json.dumps(described.get("decoder"))
        self._is_byte_level, self._has_byte_tokens, self._has_metaspace = (each in decoder for each in ('"ByteLevel"', '"ByteFallback"', '"\\u2581"'))
        self._added = {each["id"] for each in described["added_tokens"]}
        self.describe = cache(self._describe)  # bounded by the vocabulary

    def spell(self, prompt: PromptLogprobs) -> PromptLogprobs:
        """The prompt's logprobs with the texts of the tokens in them."""
        token_ids = np.unique(np.concatenate((prompt.token_ids, prompt.top_token_ids)))
        return replace(prompt, spelled_token_ids=token_ids, texts=tuple(self.describe(token_id)[0] for token_id in token_ids.tolist()))

    def _describe(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, and its bytes. A token that is a part of a character only is spelt as
        OpenAI's completions do: `bytes:\\xe6\\xb0`."""
        raw = self._bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _bytes(self, token_id: int) -> bytes:
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
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + number): byte for number, byte in enumerate(others)}}
