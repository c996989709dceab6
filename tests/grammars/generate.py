"""Answers of the demo model held to constraints: compute's own parts without Redis, all sequences in one batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tokenizers import Tokenizer

from services.compute.candidates.constraints import Constraints
from services.compute.candidates.reduction import NO_MASKS, reduce
from services.compute.loop.engine import Engine, build_engine
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.constraint import Constraint
from shared.model.files import DEMO_MODEL, open_model
from shared.model.grammar import Vocabulary, load_vocabulary
from shared.model.sampling_params import SamplingParams
from shared.process.settings import ComputeSettings
from shared.wire.messages import RequestError
from tests.waiting import wait_until

FILES = open_model("demo")
EOS = FILES.eos_token_ids
PROMPT = "Write"


@dataclass(frozen=True, slots=True)
class Answer:
    """finish_reason: stop, length, or error."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    error: RequestError | None = None


@cache
def engine() -> Engine:
    return build_engine(ComputeSettings(model="demo", dtype="bfloat16", kv_cache_memory="64MiB", num_threads=1), FILES)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@cache
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO_MODEL, FILES.vocab_size, EOS)


def make_constraints() -> Constraints:
    return Constraints(vocabulary, FILES.vocab_size)


def generate(
    asked: list[Constraint | None], *, temperature: float, max_tokens: int = 400, seed: int = 0, **params: Any
) -> list[Answer]:
    """An answer for each, drawn with seeds that follow one another."""
    constraints, scheduler = make_constraints(), engine().scheduler
    prompt: list[int] = tokenizer().encode(PROMPT).ids
    sequences = []
    for handle, constraint in enumerate(asked):
        own = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + handle, **params)
        sequence = Sequence(Request(handle, str(handle), own, EOS), Tokens(list(prompt)))
        sequences.append(sequence)
        if constraint is None:
            scheduler.add(sequence)
        else:
            constraints.open(sequence, constraint)
    errors: dict[int, RequestError] = {}
    wait_until(lambda: take_opened(constraints, errors), description="every grammar is compiled", timeout_s=120)
    while scheduler.num_unfinished:
        run_step(
            scheduler,
            partial(decide, constraints, errors),
            is_over=lambda sequence: sequence.handle in errors or is_at_its_end(sequence),
        )
    return [answer_of(sequence, errors.get(sequence.handle)) for sequence in sequences]


def take_opened(constraints: Constraints, errors: dict[int, RequestError]) -> bool:
    """Whether none is left."""
    for sequence, error in constraints.opened():
        if error is None:
            engine().scheduler.add(sequence)
        else:
            errors[sequence.handle] = error
            constraints.forget(sequence.handle)
    return not constraints.opening


def decide(
    constraints: Constraints, errors: dict[int, RequestError], batch: ScheduledBatch, sampled: list[Sequence]
) -> Iterator[int]:
    masking = constraints.start([sequence.prefix() for sequence in sampled])
    logits = engine().runner.forward(batch)
    rows = reduce(logits, sampled, engine().runner.row_search, masking.result() if masking is not None else NO_MASKS)
    chosen = dict(zip(rows.handles.tolist(), rows.chosen.tolist(), strict=True))
    errors.update({key.handle: error for key, error in rows.failures.items()})
    for sequence in sampled:
        yield chosen.get(sequence.handle, EOS[0])  # what has failed ends here


def is_at_its_end(sequence: Sequence) -> bool:
    return sequence.tokens.ids[-1] in EOS or sequence.tokens.num_output == sequence.request.params.max_tokens


def answer_of(sequence: Sequence, error: RequestError | None) -> Answer:
    output = sequence.tokens.ids[sequence.tokens.num_prompt :]
    if error is not None:
        return Answer("", tuple(output), "error", error)
    is_stopped = output[-1] in EOS
    text = (
        vocabulary().tokenizer.decode_bytes([token for token in output if token not in EOS]).decode("utf-8", "replace")
    )
    return Answer(text, tuple(output), "stop" if is_stopped else "length")
