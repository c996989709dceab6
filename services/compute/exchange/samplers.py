"""Samplers: which sampler decides for which sequence, when the sequence is introduced to it, and when it
may forget it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from services.compute.candidates.prompt_logprobs import prompt_logprobs
from services.compute.candidates.rows import CandidateRows
from services.compute.exchange.active import ActiveRequest
from shared.wire.messages import SequenceIntro, StepCandidates
from shared.wire.registry import choose_replica

PROMPT_TAIL = 8  # last prompt tokens that seed the detokenizer


class Samplers:
    """Rendezvous hashing of its request id gives each sequence a live sampler; its first row there comes
    with an introduction."""

    def __init__(self, compute_id: str, active: Mapping[int, ActiveRequest], fingerprint: str = "") -> None:
        self.compute_id = compute_id
        self.fingerprint = fingerprint
        self.active = active
        self.live: set[str] = set()
        # by sampler: handles it need not remember
        self._forget: dict[str, list[int]] = defaultdict(list)

    def follow(self, live: set[str]) -> list[int]:
        """The samplers that live now. Returns the handles of the sequences whose sampler is another than
        before, or that had none."""
        if live == self.live:
            return []
        self.live = live
        for handle, active in self.active.items():
            if active.sampler_id is not None and active.sampler_id != choose_replica(active.message.request_id, live):
                if active.sampler_id in live:
                    self._forget[active.sampler_id].append(handle)
                active.sampler_id = None
        for sampler_id in [name for name in self._forget if name not in live]:
            del self._forget[sampler_id]
        return [handle for handle, active in self.active.items() if active.sampler_id is None]

    def address(self, rows: CandidateRows, step: int) -> list[tuple[str, StepCandidates]]:
        """Make one message per sampler with its rows; none while no sampler is alive: `follow` returns
        the sequences that wait when one is."""
        by_sampler: dict[str, list[int]] = defaultdict(list)
        intros: dict[str, list[SequenceIntro]] = defaultdict(list)
        for index, handle in enumerate(rows.handles.tolist()):
            active = self.active[handle]
            if active.sampler_id is None:
                active.sampler_id = choose_replica(active.message.request_id, self.live)
                if active.sampler_id is None:
                    continue
                intros[active.sampler_id].append(introduction(active, self.fingerprint))
            by_sampler[active.sampler_id].append(index)
        return [
            (
                sampler_id,
                rows.message(own, self.compute_id, step, tuple(intros[sampler_id]), self._forget.pop(sampler_id, [])),
            )
            for sampler_id, own in by_sampler.items()
        ]

    def reintroduce(self, handles: Iterable[int]) -> None:
        """Introduce sequences again: their samplers may have forgotten them, or never known them."""
        for handle in handles:
            self.active[handle].sampler_id = None

    def forget(self, active: ActiveRequest) -> None:
        """The sequence has ended here, and its sampler does not know: the next message says so."""
        if active.sampler_id is not None:
            self._forget[active.sampler_id].append(active.sequence.handle)


def introduction(active: ActiveRequest, fingerprint: str) -> SequenceIntro:
    """The introduction of a sequence to a sampler, by a replica of this fingerprint."""
    sequence, request = active.sequence, active.message
    scored = prompt_logprobs(sequence)
    wants_ids = (
        sequence.request.params.returns_prompt_token_ids and sequence.tokens.num_decided == sequence.tokens.num_prompt
    )
    return SequenceIntro(
        handle=sequence.handle,
        request_id=request.request_id,
        gateway_id=active.gateway_id,
        params=sequence.request.params,
        eos_token_ids=sequence.request.eos_token_ids,
        num_prompt_tokens=sequence.num_prompt_ids,
        prompt_tail=request.prompt_token_ids[-PROMPT_TAIL:],
        echo_text=request.echo_text,
        num_cached_tokens=sequence.num_cached_tokens,
        num_decided_tokens=sequence.tokens.num_decided - sequence.tokens.num_prompt,
        prompt_logprobs=None if scored is None else replace(scored, text_offsets=request.echo_offsets),
        prompt_token_ids=request.prompt_token_ids if wants_ids else None,
        traceparent=request.traceparent,
        tokenized_at=request.tokenized_at,
        scheduled_at=active.scheduled_at,
        fingerprint=fingerprint,
        prediction_token_ids=request.prediction_token_ids,
    )
