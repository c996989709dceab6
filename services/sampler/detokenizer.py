"""Token ids to text, as they come, in whole characters."""

from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shared.model.token_table import TokenTable
from shared.process.errors import StartupError
from shared.wire.logprobs import PromptLogprobs

# tokens without text. A character has at most four bytes; more tokens never become one, and are
# decoded as they are
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


def spell(table: TokenTable, prompt: PromptLogprobs) -> PromptLogprobs:
    """The prompt's logprobs with the texts of the tokens in them."""
    token_ids = np.unique(np.concatenate((prompt.token_ids, prompt.top_token_ids)))
    return replace(
        prompt, spelled_token_ids=token_ids, texts=tuple(table.describe(token_id)[0] for token_id in token_ids.tolist())
    )
