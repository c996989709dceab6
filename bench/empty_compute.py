"""A compute stage without a model, for bench.sizing: it speaks the whole protocol, and computes nothing.

It takes prompts, asks samplers for tokens, runs ahead of them and ends requests by the exchange of
services/compute. Its candidates are rows that were drawn at the start: one for a greedy request, 64
for any other. It draws from them by the rule that the sampler draws by, so it knows the token that
comes as a real compute stage does.
"""

import itertools
import time

import numpy as np

from services.compute.cache.block_manager import BlockManager
from services.compute.candidates.rows import CandidateRows, new_rows
from services.compute.exchange.active import ActiveRequest, Attempts, Decision
from services.compute.exchange.exchange import Exchange
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.decision import Draws, decide
from shared.model.files import open_model
from shared.process.settings import ComputeSettings, load_settings
from shared.wire.entries import Delivery
from shared.wire.line import Pipeline
from shared.wire.load import Load
from shared.wire.stage import Stage, run_stage, start_logging
from shared.wire.streams import reader_key, response_of, tombstone_key

NUM_ROWS = 4096  # that are drawn at the start; a token has one of them
LISTED = 64  # candidates of a row that is not greedy
FIRST_TEXT = 260  # token ids from here on have text in byte-level vocabularies
MAX_SEQS = 4096
IDLE_WAIT_S, UPKEEP_EVERY_S = 0.2, 1.0


class EmptyCompute:
    def __init__(self, stage: Stage, settings: ComputeSettings, vocab_size: int) -> None:
        self.stage = stage
        self.run_ahead = max(1, settings.run_ahead)
        self.active: dict[int, ActiveRequest] = {}
        interval_s = (settings.publish_interval_ms or 0.0) / 1000
        blocks = BlockManager(1, 16, prefix_caching=False)
        self.exchange = Exchange(
            stage, self.active, blocks, publish_interval_s=interval_s, max_held=max(1, self.run_ahead - 1)
        )
        rng = np.random.default_rng(0)
        self.token_ids = rng.integers(FIRST_TEXT, vocab_size, (NUM_ROWS, LISTED)).astype(np.int32)
        self.logits = -np.sort(-rng.normal(size=(NUM_ROWS, LISTED)).astype(np.float32) * 3, axis=1)
        self.handles = itertools.count()
        self.num_tokens = self.num_steps = 0
        stage.on_heartbeat = self.on_heartbeat

    def run(self) -> None:
        self.stage.catch_signals()
        self.stage.transport.wait_until_up(self.stage.settings.redis_timeout_s)
        self.exchange.start()
        self.stage.join()
        upkept_at = 0.0
        while not self.stage.stopping.is_set():
            self.receive(wait_s=0.0 if self.step() else IDLE_WAIT_S)
            self.stage.mark_alive()
            if time.monotonic() - upkept_at > UPKEEP_EVERY_S:
                upkept_at = time.monotonic()
                self.exchange.follow_clock()
        self.stage.leave()
        self.exchange.leave()

    def step(self) -> bool:
        """A step of all sequences that are not too far ahead of their logs. Returns whether there were any."""
        everything = [active.sequence for active in self.active.values()]
        sequences = [
            each
            for each in everything
            if len(each.tokens) < each.max_num_tokens and each.tokens.num_undecided < self.run_ahead
        ]
        if not sequences:
            return False
        rows = self.rows(sequences)
        for sequence, token_id in zip(sequences, rows.chosen.tolist(), strict=True):
            sequence.tokens.foresee(token_id)
        self.num_steps += 1
        self.exchange.send(
            rows,
            is_urgent=any(each.tokens.num_output == 1 or len(each.tokens) == each.max_num_tokens for each in sequences),
        )
        return True

    def rows(self, sequences: list[Sequence]) -> CandidateRows:
        """Their next tokens' candidates."""
        count = len(sequences)
        handles, positions = (
            np.array([getattr(each, name) for each in sequences], np.int32) for name in ("handle", "next_position")
        )
        places = (31 * handles + positions) % NUM_ROWS
        counts = np.array([1 if each.request.params.is_greedy else LISTED for each in sequences], np.int32)
        width = int(counts.max())
        token_ids, logits = self.token_ids[places, :width], self.logits[places, :width]
        columns = np.zeros(count, np.int64)
        if width > 1:
            temperatures = np.array([each.request.params.temperature for each in sequences])
            seeds = np.array([each.request.params.seed for each in sequences], np.uint64)
            columns = decide(Draws(logits, token_ids, counts, np.zeros(count), temperatures, seeds, positions))
        previous = [each.tokens.ids[-1] if each.tokens.num_output else -1 for each in sequences]
        rows = new_rows(handles, positions, np.array(previous, np.int32))
        rows.counts = rows.num_kept = counts
        rows.token_ids, rows.logits = token_ids, logits
        rows.chosen = token_ids[np.arange(count), columns]
        return rows

    def receive(self, *, wait_s: float) -> None:
        received = self.exchange.receive(MAX_SEQS - len(self.active), wait_s=wait_s)
        for decision in received.decisions:
            self.apply(decision)
        if received.dead or self.exchange.resend_overdue():
            raise RuntimeError(
                "a prompt that can't be read, or a sampler that does not answer: nothing to measure with"
            )
        if received.prompts:
            self.admit(received.prompts)

    def apply(self, decision: Decision) -> None:
        active = self.active[decision.handle]
        active.sequence.tokens.confirm()
        self.num_tokens += 1
        if decision.token_id != active.sequence.tokens.ids[active.sequence.tokens.num_decided - 1]:
            raise RuntimeError("the sampler decided another token than the one foreseen: nothing to measure with")
        if decision.is_finished:
            self.exchange.forget(active, tell_sampler=False)
            del self.active[decision.handle]

    def admit(self, deliveries: list[Delivery]) -> None:
        """Asks Redis what a compute stage asks, and writes down what it writes."""

        def ask(pipe: Pipeline) -> None:
            for delivery in deliveries:
                pipe.exists(tombstone_key(delivery.message.request_id))
                pipe.hget(reader_key(response_of(delivery.message.request_id)), "gateway")

        self.stage.transport.run(ask)
        for delivery in deliveries:
            request, handle = delivery.message, next(self.handles)
            prompt = request.prompt_token_ids.tolist()
            sequence = Sequence(
                Request(handle, request.request_id, request.params, request.eos_token_ids), Tokens(prompt)
            )
            self.active[handle] = ActiveRequest(
                sequence, request, delivery.entry_id, request.gateway_id, scheduled_at=time.time()
            )
        self.exchange.remember([Attempts(has_run=True).record(each.message.request_id) for each in deliveries])

    def on_heartbeat(self, pipe: Pipeline) -> None:
        """Runs in the heartbeat's thread."""
        self.exchange.prompts.renew(pipe, [active.entry_id for active in list(self.active.values())])
        self.stage.load = Load(
            running=len(self.active),
            waiting=0,
            max_num_seqs=MAX_SEQS,
            output_tokens=self.num_tokens,
            steps=self.num_steps,
        )


def main() -> None:
    settings = load_settings(ComputeSettings)
    start_logging(settings)
    files = open_model(settings.model, settings.served_model_name)
    stage = Stage("compute", settings, model=files.name, aliases=files.aliases, max_model_len=files.max_model_len)
    stage.fingerprint = "empty"
    EmptyCompute(stage, settings, files.vocab_size).run()


if __name__ == "__main__":
    run_stage(main)
