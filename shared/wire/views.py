"""Views: the state that a replica shows while the pipeline is watched. The heartbeat's thread makes
them, so they are exact to within a step."""

from shared.model.wire_struct import WireStruct

MAX_SEQUENCES_SHOWN = 64  # of a replica: what runs first, then what waits
MAX_BLOCKS_SHOWN = 256  # of a sequence


class SequenceView(WireStruct, frozen=True):
    """A sequence that a compute replica answers for."""

    request_id: str
    is_running: bool  # it has a place in the steps; else it waits
    sampler_id: str | None  # None: it was not introduced to one yet
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_computed_tokens: int
    num_output_tokens: int
    num_undecided_tokens: int  # the last of the output, foreseen
    num_preemptions: int
    num_blocks: int
    block_runs: tuple[int, ...]  # its first blocks: first id, count, first id, count, …
    created_at: float  # wall clock, s, as its gateway has it
    tokenized_at: float  # the same, as its tokenizer has it
    taken_at: float  # it came to this replica
    scheduled_at: float  # its first step here began; 0: not yet
    num_accepted_tokens: int = 0  # of its output, that were drafted


class ComputeView(WireStruct, frozen=True):
    """A compute replica's sequences, and its KV cache."""

    replica_id: str
    block_size: int  # tokens
    num_blocks: int
    num_held_blocks: int  # in some sequence's table
    num_cached_blocks: int  # held by no sequence, kept as a prefix for others
    num_sequences: int  # all, shown or not
    sequences: tuple[SequenceView, ...]
