"""Prompts of real text with a wanted number of tokens: the prose of Python's reference manual, by
the tokenizer of the model that is asked.
"""

from pathlib import Path
from pydoc_data.topics import topics

from services.sampler.detokenizer import load_tokenizer

STRIDE = 7919  # tokens from one prompt's beginning to the next one's; a prime, so that few share one


class Prose:
    """Prompts, no two of which begin alike before each token of the manual has begun one: a prefix
    cache finds nothing.
    """

    def __init__(self, folder: Path) -> None:
        """folder: the model's. Raises StartupError without a tokenizer.json."""
        self.tokenizer = load_tokenizer(folder)
        paragraphs = dict.fromkeys(
            each for name in sorted(topics) for each in topics[name].split("\n\n")
        )  # some are in several topics
        prose = [each for each in paragraphs if 2 * sum(map(str.isalpha, each)) > len(each)]  # and some are tables
        self.token_ids: list[int] = self.tokenizer.encode("\n\n".join(prose), add_special_tokens=False).ids
        self._num_taken = 0

    def take(self, num_tokens: int) -> str:
        """The next prompt. Where it is cut it may be read as a token more or less."""
        start = self._num_taken * STRIDE % len(self.token_ids)
        self._num_taken += 1
        around = self.token_ids[start:] + self.token_ids * (-(-num_tokens // len(self.token_ids)))
        return str(self.tokenizer.decode(around[:num_tokens], skip_special_tokens=False))
