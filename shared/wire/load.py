"""The figures that a replica announces of its work: typed here, on the wire a flat map of names to numbers.

The map holds the figures that the replica has. A reader passes over names that it does not know,
which a newer version may write; it refuses a known one that is no finite number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from shared.process.errors import Invalid

StepPart = Literal["schedule", "forward", "reduce", "publish", "wait"]
STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
_BUCKET = re.compile(r"iteration_tokens_([0-9]+|inf)")
_PLACE = re.compile(r"spec_decode_accepted_([0-9]+)")


@dataclass(frozen=True, slots=True)
class Load:
    """Figures of a replica. None: its stage has no such figure, or not yet. Counters are totals
    since the replica's start. On the wire: a map of the figures that there are."""

    # of a gateway, and of compute
    running: float | None = None  # sequences that a gateway answers, or that have a place in compute's steps
    output_tokens: float | None = None  # tokens sent, or decided
    # of a gateway
    ttft_s: float | None = None  # median over the last minutes
    # of a tokenizer
    requests: float | None = None  # handed on or answered
    # of a sampler, and of a worker of batches
    sequences: float | None = None  # held, or in the pipeline
    # of a sampler
    tokens: float | None = None  # rows decided, or answered from a log
    rebuilt: float | None = None  # sequences introduced
    # of a worker of batches
    batches: float | None = None  # under way
    max_sequences: float | None = None  # as many as it may have in the pipeline
    deaths: float | None = None  # of workers, in the last ten minutes
    # of compute
    waiting: float | None = None  # sequences without a place
    max_num_seqs: float | None = None  # places
    preemptions: float | None = None
    kv_cache_usage: float | None = None  # from 0 to 1
    prefix_cache_queries: float | None = None  # tokens
    prefix_cache_hits: float | None = None  # tokens
    kv_disk_tokens: float | None = None  # whose keys and values were read from the file of --kv-disk
    kv_disk_blocks_written: float | None = None
    kv_disk_blocks_dropped: float | None = None  # not written, for too many waited
    kv_disk_passed_over: float | None = None  # sequences that were not looked up there: computing is faster
    images_encoded: float | None = None
    images_found: float | None = None  # of sequences, whose embeddings were there already
    image_encoder_s: float | None = None  # that it took
    images_waiting: float | None = None  # sequences that wait for theirs
    prompt_tokens: float | None = None  # computed
    surplus_tokens: float | None = None  # computed for nothing
    claimed: float | None = None  # requests taken over
    offered: float | None = None  # requests that came here because their prefix is here
    stolen: float | None = None  # requests that waited too long for another, which has their prefix
    predicted_peaks: float | None = None  # of KV memory, followed to their end
    predicted_peaks_exceeded: float | None = None
    predicted_peak_ratio_sum: float | None = None  # of real / predicted
    step_cost_fixed_s: float | None = None
    step_cost_per_token_s: float | None = None
    step_cost_per_context_token_s: float | None = None
    spec_decode_drafts: float | None = None  # times that a sequence had drafts
    spec_decode_draft_tokens: float | None = None
    spec_decode_accepted_tokens: float | None = None
    steps: float | None = None
    iteration_tokens: float | None = None  # computed in those steps
    # by part, on the wire step_<part>_s
    step_s: Mapping[StepPart, float] = field(default_factory=dict)
    # how many steps had so many tokens, by the bucket's upper end in rising order ("inf" is the
    # last); on the wire iteration_tokens_<end>
    steps_by_tokens: Mapping[str, float] = field(default_factory=dict)

    # how often the draft at a place stood, by place ("0" is the first); on the wire
    # spec_decode_accepted_<place>
    accepted_by_place: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """The figures that there are, but for those of the steps' parts and buckets, and of the
        drafts' places."""
        values = {name: getattr(self, name) for name in SCALARS}
        return {name: value for name, value in values.items() if value is not None}

    def packed(self) -> dict[str, float]:
        """Itself, as it is on the wire."""
        parts = {f"step_{part}_s": seconds for part, seconds in self.step_s.items()}
        places = {f"spec_decode_accepted_{place}": count for place, count in self.accepted_by_place.items()}
        return (
            self.figures()
            | parts
            | places
            | {f"iteration_tokens_{end}": count for end, count in self.steps_by_tokens.items()}
        )

    @classmethod
    def unpacked(cls, value: Any) -> Load:
        """The load that is such a map on the wire. Raises Invalid."""
        if not isinstance(value, dict):
            raise Invalid("replica.load: expected a map")
        figures: dict[str, Any] = {name: _number(value, name) for name in SCALARS if name in value}
        step_s = {part: _number(value, name) for part in STEP_PARTS if (name := f"step_{part}_s") in value}
        buckets = {
            match[1]: _number(value, name)
            for name in value
            if isinstance(name, str) and (match := _BUCKET.fullmatch(name))
        }
        places = {
            match[1]: _number(value, name)
            for name in value
            if isinstance(name, str) and (match := _PLACE.fullmatch(name))
        }
        return cls(**figures, step_s=step_s, steps_by_tokens=buckets, accepted_by_place=places)


SCALARS = tuple(each.name for each in fields(Load) if each.default is None)


def _number(values: dict[Any, Any], name: str) -> float:
    value = values[name]
    if type(value) not in (float, int) or not math.isfinite(value):
        raise Invalid(f"replica.load: expected {name} to be a finite number, got {value!r:.20}")
    return value  # type: ignore[no-any-return]
