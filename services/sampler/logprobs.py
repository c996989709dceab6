"""LogprobHolder: logprobs wait until the text of their tokens is released, for a stop string may
still cut it off."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from shared.wire.logprobs import TokenLogprob


@dataclass(slots=True)
class LogprobHolder:
    """Logprobs of tokens in order, each with the first and the last character of its token's text,
    counted from the answer's beginning."""

    # of the prompt, which precede the answer in the text that the client gets
    num_echo_chars: int = 0
    held: list[tuple[int, int, TokenLogprob]] = field(default_factory=list)

    @property
    def last(self) -> TokenLogprob | None:
        """The last token's logprob, if it is still held."""
        return self.held[-1][2] if self.held else None

    def hold(self, logprob: TokenLogprob, first: int, last: int) -> None:
        """Keep it until the text up to `last` is released."""
        self.held.append((first, last, replace(logprob, text_offset=self.num_echo_chars + first)))

    def release(self, num_released: int, *, at_end: bool) -> tuple[TokenLogprob, ...]:
        """The logprobs of the tokens whose text is out. At the end, those that begin in the cut-off
        stop string are dropped."""
        ready = [entry for entry in self.held if entry[1] <= num_released or (at_end and entry[0] < num_released)]
        self.held = [] if at_end else self.held[len(ready) :]
        return tuple(logprob for _, _, logprob in ready)
