"""Sequence: one stream of tokens being computed. No torch here, nor in batch, block_manager and scheduler: they are plain accounting."""

from collections import Counter
from dataclasses import dataclass, field

from shared.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Only Scheduler and BlockManager change num_computed_tokens and block_table; only Scheduler appends tokens."""

    handle: int  # unique in this process; names the sequence in StepCandidates
    request_id: str
    token_ids: list[int]  # the prompt, then the decided tokens
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0  # tokens whose KV is written; below len(token_ids) while it runs
    block_table: list[int] = field(default_factory=list)  # one block id per block_size tokens, append-only
    is_finished: bool = False
    _counts: Counter[int] = field(default_factory=Counter)
    _num_counted: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """The longest it can become."""
        return self.num_prompt_tokens + (self.params.max_tokens or 0)

    @property
    def next_position(self) -> int:
        """The position in the token log of the token to be decided next."""
        return self.num_output_tokens + 1

    def output_counts(self) -> Counter[int]:
        """How often each token was decided; counted up as the sequence grows."""
        for token_id in self.token_ids[self.num_prompt_tokens + self._num_counted :]:
            self._counts[token_id] += 1
        self._num_counted = self.num_output_tokens
        return self._counts
