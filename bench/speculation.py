"""What does speculation gain? Tokens/s with it over without, by the kind of text and the number of
streams; the share of drafts that stand, and how many tokens a drafted step gives.

Method: the compute loop in one process (scheduler, proposers, runner, reduction, decisions taken at
once), the same requests with --speculate and with off, in turns; the median of the rounds' ratios
counts. The first round is not counted: it is there that kernels, and what drafts cost, are learned.
Every answer is compared: one that differs ends the run. Ceiling: the mean number of tokens a
sequence gets of a step, were drafts free. Draft_ms and step_ms: what each place of the drafts of a
model takes, all streams together, and a step without drafts.

    python -m bench.speculation --model smollm2-135m [--streams 1 8 64] [--kinds edit json]
    [--speculate lookup] [--heads FOLDER] [--rounds 5]
    python -m bench.speculation --model smollm2-135m --speculate self [--self-draft smollm2-135m-w4] --streams 1
    python -m bench.speculation --model smollm2-135m --speculate self --streams 1 --kinds prose
    --take-all --write-chains chains.json
    python -m bench.speculation --model llama-3.2-1b --speculate self --streams 1 --kinds prose
    --impose-chains chains.json
    python -m bench.speculation --model smollm2-135m --invariance 1000

--impose-chains: a model of random weights (penstock make-model) says nothing of how often its
drafts stand. So they stand as another model's did, whose
chains --write-chains wrote; what they cost is the model's own (bench/speculation_chains.py).
--take-all: every draft is computed, whatever it costs.
--cpu-time: all times are the process's CPU seconds, on one thread: for a machine that others use meanwhile.
--invariance: so many requests of mixed parameters, with drafts and without, and how many texts differ.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs
from tokenizers import Tokenizer

from bench.quality import choose_model, docstrings
from bench.speculation_chains import Imposer, Recorder, TakeAll
from services.compute.candidates.constraints import Constraints
from services.compute.candidates.reduction import NO_MASKS, begin_reduction
from services.compute.loop.engine import Engine, build_engine
from services.compute.loop.flight import collect, launch, rows_still_valid
from services.compute.scheduling.policy import StepPolicy
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.speculation.chains import ChainProposer
from services.compute.speculation.control import DraftControl
from services.compute.speculation.model_free import make_proposers
from services.compute.speculation.speculation import Speculation, Tally
from shared.model.constraint import Constraint
from shared.model.files import ModelFiles
from shared.model.sampling_params import DryParams, SamplingParams
from shared.process.settings import ComputeSettings

CODE = '''def total_price(items, discount):
    """The price of all items, less the discount."""
    total = 0.0
    for item in items:
        total += item.price * item.quantity
    if discount > 0:
        total = total * (1 - discount)
    return round(total, 2)


def print_receipt(items, discount):
    """Print a line for each item, and the total price."""
    for item in items:
        print(item.name, item.quantity, item.price)
    print("total", total_price(items, discount))
'''
KEYS = (
    "customer_identification_number",
    "preferred_language_of_communication",
    "date_of_last_successful_payment",
    "is_subscribed_to_newsletter",
)
SCHEMA = {
    "type": "object",
    "required": list(KEYS),
    "additionalProperties": False,
    "properties": {
        KEYS[0]: {"type": "integer", "maximum": 99999},
        KEYS[1]: {"enum": ["English", "German", "French"]},
        KEYS[2]: {"type": "string", "maxLength": 12},
        KEYS[3]: {"type": "boolean"},
    },
}
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    name: str
    prompt: str
    params: SamplingParams
    constraint: Constraint | None = None
    begun: str = ""  # the answer's beginning, which is given


def kinds() -> list[Kind]:
    prose = docstrings()
    story = "Write a long story about a lighthouse keeper and the sea."
    return [
        # a small model copies a program, with changes, where its answer has begun; left to itself it makes up another
        Kind(
            "edit",
            f"Fix the bug in this program, and print it again as a whole:\n\n```python\n{CODE}```",
            GREEDY,
            begun="Here is the fixed program:\n\n```python\n",
        ),
        Kind("repeat", f"Repeat this text word for word:\n\n{prose[200:1200]}", GREEDY),
        Kind("json", "Make up a customer's record.", DRAWN, Constraint("json_schema", json.dumps(SCHEMA))),
        Kind("summary", f"Summarize this text:\n\n{prose[1000:3000]}", GREEDY),
        Kind("prose, T 0", story, GREEDY),
        Kind("prose, T 0.8", story, DRAWN),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float  # of decoding: without the prompts
    num_tokens: int  # decided in them
    answers: list[list[int]]
    tally: Tally


class Loop:
    """The compute loop, without a pipeline."""

    def __init__(self, files: ModelFiles, options: argparse.Namespace) -> None:
        settings = ComputeSettings(
            model=str(files.folder),
            kv_cache_memory="1GiB",
            quantization=options.quantization,
            prefix_caching=False,
            num_threads=options.threads,
            speculate=options.speculate,
            self_draft=options.self_draft,
            draft_model=options.draft_model,
            heads=options.heads,
        )
        self.engine: Engine = build_engine(settings, files)
        self.scheduler, self.runner = self.engine.scheduler, self.engine.runner
        self.constraints = Constraints(self.engine.load_vocabulary, self.runner.vocab_size)
        self.chains = self._chains(options)
        self.loaded = self.engine.proposers if self.chains is None else [self.chains]
        self.names = tuple(options.speculate.split(","))
        control = (
            TakeAll()
            if options.take_all
            else DraftControl(frozenset(each.name for each in self.loaded if each.stops_itself))
        )
        self.by_mode = {
            is_on: Speculation([], self.constraints, self.runner.vocab_size, control) for is_on in (True, False)
        }
        self.most = options.num_speculative_tokens
        self.eos_token_ids = files.eos_token_ids
        self.num_sequences = 0

    def run(self, asked: list[tuple[list[int], SamplingParams, Constraint | None]], *, is_on: bool) -> Outcome:
        """Answer these requests together."""
        speculation = self.by_mode[is_on]
        if is_on:  # what is learned of costs and chances stays; answers that were given before do not
            speculation.proposers = make_proposers(self.names, self.constraints, self.loaded)
        self.policy = StepPolicy(drafting=speculation.drafting(self.most, self.engine.max_sampled))
        before = replace(speculation.total)
        sequences = []
        for prompt, params, constraint in asked:
            self.num_sequences += 1
            ends = () if constraint is None and params.stop_token_ids == () else self.eos_token_ids
            sequence = Sequence(Request(self.num_sequences, "r", params, ends), Tokens(list(prompt)))
            if constraint is not None:
                self.constraints.open(sequence, constraint)
            sequences.append(sequence)
        while self.constraints.opening:
            failed = [error for _, error in self.constraints.opened() if error is not None]
            assert not failed, failed
            time.sleep(0.001)
        for sequence in sequences:
            self.scheduler.add(sequence)
        seconds, num_tokens = 0.0, 0
        while self.scheduler.num_unfinished:
            began = time.perf_counter()
            is_decoding, decided = self.step(speculation)
            if is_decoding:
                seconds, num_tokens = seconds + time.perf_counter() - began, num_tokens + decided
        for sequence in sequences:
            speculation.forget(sequence.handle)
            self.constraints.forget(sequence.handle)
        answers = [each.tokens.ids[each.tokens.num_prompt :] for each in sequences]
        if isinstance(self.chains, Imposer):
            self.chains.answers = {
                each.request.params.seed: answer for each, answer in zip(sequences, answers, strict=True)
            }
        total = speculation.total
        tally = Tally(
            total.num_drafts - before.num_drafts,
            total.num_draft_tokens - before.num_draft_tokens,
            total.num_accepted_tokens - before.num_accepted_tokens,
        )
        return Outcome(seconds, num_tokens, answers, tally)

    @property
    def step_s(self) -> float:
        """The seconds that a step of one sequence takes without drafts."""
        control = self.by_mode[True].control
        assert isinstance(control, DraftControl)
        return control.step_time.seconds(1)

    def _chains(self, options: argparse.Namespace) -> Recorder | None:
        if not options.write_chains and not options.impose_chains:
            return None
        [inner] = self.engine.proposers
        assert isinstance(inner, ChainProposer)
        return (
            Imposer(inner, options.impose_chains, self.runner.vocab_size) if options.impose_chains else Recorder(inner)
        )

    def step(self, speculation: Speculation) -> tuple[bool, int]:
        """As service.py does it. Returns whether it had no chunk of a prompt, and its tokens."""
        began = time.perf_counter()
        batch = self.scheduler.schedule(self.policy)
        assert batch is not None
        rows = rows_still_valid(batch, self.scheduler)
        masking = self.constraints.start(rows.values())
        hidden = self.runner.run(batch)
        logits = self.runner.logits(batch, hidden, rows)
        masks = masking.result() if masking is not None else NO_MASKS
        flight = launch(
            batch, hidden, begin_reduction(logits, list(rows.values()), self.runner.row_search, masks), self.scheduler
        )
        rows_that_stand, failures, _ = collect(flight, self.scheduler)
        assert not failures and not flight.reduction.failures
        num_decided = Counter(rows_that_stand.handles.tolist())
        speculation.computed(batch, hidden, num_decided)
        for handle, count in num_decided.items():
            sequence = self.scheduler.get(handle)
            is_last = sequence.tokens.is_ending
            for _ in range(count):
                self.scheduler.confirm(sequence)
            if is_last:
                self.scheduler.finish(sequence, is_complete=True)
        speculation.timed(batch, time.perf_counter() - began)
        return batch.num_decodes == len(batch.rows), num_decided.total()


def chat_text(kind: Kind, *, has_marks: bool) -> str:
    """The prompt as a chat's only message, by ChatML's marks where the model has them, and the
    beginning of its answer.
    """
    text = f"<|im_start|>user\n{kind.prompt}<|im_end|>\n<|im_start|>assistant\n" if has_marks else kind.prompt
    return text + kind.begun


def encode(tokenizer: Tokenizer, kind: Kind) -> list[int]:
    text = chat_text(kind, has_marks=tokenizer.token_to_id("<|im_start|>") is not None)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def compare(
    loop: Loop, tokenizer: Tokenizer, kind: Kind, streams: int, options: argparse.Namespace
) -> dict[str, object]:
    """One cell of the table."""
    prompt = encode(tokenizer, kind)
    asked = [
        (
            prompt,
            structs.replace(kind.params, seed=number, max_tokens=options.tokens, stop_token_ids=()),
            kind.constraint,
        )
        for number in range(streams)
    ]
    ratios, tally, rates = [], Tally(), []
    if loop.chains is not None:
        loop.chains.kind = kind.name
    for number in range(options.rounds + 1):
        modes = (True, False) if number % 2 else (False, True)
        found = {is_on: loop.run(asked, is_on=is_on) for is_on in modes}
        if found[True].answers != found[False].answers:
            raise SystemExit(f"{kind.name}, {streams} streams: an answer differs")
        if number:
            rate, plain = (found[is_on].num_tokens / found[is_on].seconds for is_on in (True, False))
            ratios.append(rate / plain)
            rates.append(plain)
            tally = found[True].tally
    share = tally.num_accepted_tokens / tally.num_draft_tokens if tally.num_draft_tokens else 0.0
    length = 1 + tally.num_accepted_tokens / tally.num_drafts if tally.num_drafts else 1.0
    num_drafted = tally.num_drafts / max(1, found[True].num_tokens - tally.num_accepted_tokens)
    return {
        "kind": kind.name,
        "streams": streams,
        "ratio": round(statistics.median(ratios), 3),
        "plain_tokens_per_s": round(statistics.median(rates), 1),
        "share_accepted": round(share, 3),
        "mean_length": round(length, 2),
        "share_of_steps_drafted": round(num_drafted, 3),
        "draft_ms": {name: round(1000 * seconds, 2) for name, seconds in loop.by_mode[True].place_s.items()},
        "step_ms": round(1000 * loop.step_s, 2),
        "ceiling": round(found[True].num_tokens / max(1, found[True].num_tokens - tally.num_accepted_tokens), 2),
    }


def mixed(
    tokenizer: Tokenizer, count: int, longest: int
) -> Iterator[tuple[list[int], SamplingParams, Constraint | None]]:
    """Requests of all kinds, and what is asked of their tokens."""
    rng, chosen = random.Random(0), kinds()
    for number in range(count):
        kind = rng.choice(chosen)
        more: dict[str, object] = rng.choice(
            [
                {},
                {"temperature": 0.0},
                {"temperature": 1.2, "top_p": 0.9},
                {"top_k": 20, "logprobs": 3},
                {"min_p": 0.05},
                {"repetition_penalty": 1.2},
                {"frequency_penalty": 0.8, "presence_penalty": 0.3},
                {"dry": DryParams(0.8, allowed_length=2)},
                {"min_tokens": 8, "stop_token_ids": (5, 11, 13)},
            ]
        )
        yield (
            encode(tokenizer, kind),
            structs.replace(kind.params, seed=number, max_tokens=rng.randrange(8, longest), **more),
            kind.constraint,
        )


def invariance(loop: Loop, tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, object]:
    """How many texts differ with drafts and without."""
    asked = list(mixed(tokenizer, options.invariance, options.tokens))
    num_different, tally, rng = 0, Tally(), random.Random(1)
    while asked:
        size = rng.choice((1, 3, 8, 24))
        some, asked = asked[:size], asked[size:]
        drafted, plain = loop.run(some, is_on=True), loop.run(some, is_on=False)
        num_different += sum(one != other for one, other in zip(drafted.answers, plain.answers, strict=True))
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            setattr(tally, name, getattr(tally, name) + getattr(drafted.tally, name))
        print(
            f"{options.invariance - len(asked)} of {options.invariance}, {num_different} different, {tally}", flush=True
        )
    return {
        "requests": options.invariance,
        "different": num_different,
        "drafted": tally.num_draft_tokens,
        "accepted": tally.num_accepted_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help="a checkpoint folder, a GGUF file or a model's name (default: smollm2-135m if it is there, else the demo)",
    )
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--speculate", default="auto", help="as compute takes it (default: %(default)s)")
    parser.add_argument("--self-draft", default="", help="as compute takes it")
    parser.add_argument("--draft-model", default="", help="as compute takes it")
    parser.add_argument(
        "--heads", default="", metavar="FOLDER", help="of Medusa heads or an EAGLE-3 head, which propose, too"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kinds", nargs="+", help="some of the kinds, by the first word of their names (default: all)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds; with --threads 1")
    parser.add_argument("--take-all", action="store_true", help="compute all drafts, be they worth it or not")
    parser.add_argument(
        "--write-chains",
        type=Path,
        metavar="FILE",
        help="how long the chains of a model that drafts were, and how far they stood",
    )
    parser.add_argument(
        "--impose-chains", type=Path, metavar="FILE", help="let chains be as long as those, and stand as far"
    )
    parser.add_argument(
        "--invariance", type=int, help="compare so many requests of mixed parameters, and measure nothing"
    )
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    files = choose_model(options.model)
    tokenizer, loop = Tokenizer.from_file(str(files.folder / "tokenizer.json")), Loop(files, options)
    if options.invariance:
        result = invariance(loop, tokenizer, options)
        print(json.dumps({"model": files.name, **result}))
        raise SystemExit(int(result["different"] != 0))
    results = []
    for kind in kinds():
        for streams in options.streams if options.kinds is None or kind.name.split(",")[0] in options.kinds else ():
            results.append(compare(loop, tokenizer, kind, streams, options))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.write_chains and loop.chains is not None:
        loop.chains.write(options.write_chains)
    print(json.dumps({"model": files.name, "results": results}))


if __name__ == "__main__":
    main()
