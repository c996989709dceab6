"""A model's own answers to prompts, and the hidden states that it drew each token from."""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from services.compute.candidates.reduction import reduce
from services.compute.loop.engine import Engine
from services.compute.scheduling.offline import run_step
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import ScheduledBatch
from shared.model.files import ModelFiles
from shared.model.sampling_params import SamplingParams

AT_ONCE = 64  # answers
LONGEST = 256  # tokens of an answer
HELD_OUT_EVERY = 10  # the first of so many prompts is held out, with its answers


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of some answers, one after the other."""

    states: Tensor  # [N, hidden] bfloat16, behind the last norm: what each token was drawn from
    token_ids: Tensor  # [N] int64
    numbers: Tensor  # [N] int64: of the answer that a token belongs to

    def only(self, which: Tensor) -> "Answers":
        """Some of the tokens. which: [N] bool."""
        return Answers(self.states[which], self.token_ids[which], self.numbers[which])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    num_tokens: int  # of all answers, about
    temperature: float | None  # None: as the model's makers say
    seed: int


def generate(
    engine: Engine, files: ModelFiles, prompts: list[list[int]], sampling: Sampling
) -> tuple[Answers, Answers]:
    """Answer the prompts in their order, again and again with other seeds, until there are about so
    many tokens. Returns what heads may learn of, and what is
    held out: the answers to other prompts."""
    answers = _answer(engine, files, prompts, sampling)
    is_held_out = answers.numbers % len(prompts) % HELD_OUT_EVERY == 0
    return answers.only(~is_held_out), answers.only(is_held_out)


def _answer(engine: Engine, files: ModelFiles, prompts: list[list[int]], sampling: Sampling) -> Answers:
    runner, scheduler, num_tokens = engine.runner, engine.scheduler, sampling.num_tokens
    sampled = files.sampling | ({} if sampling.temperature is None else {"temperature": sampling.temperature})
    states: list[Tensor] = []  # step by step
    token_ids: list[int] = []
    numbers: list[int] = []

    def decide(batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
        hidden = runner.run(batch)
        if sampled:
            states.append(runner.sampled_states(batch, hidden).bfloat16().cpu())
            token_ids.extend(reduce(runner.logits(batch, hidden), sampled, runner.row_search).chosen.tolist())
            numbers.extend(sequence.handle for sequence in sampled)
        return token_ids[len(token_ids) - len(sampled) :]

    def is_over(sequence: Sequence) -> bool:
        return (
            sequence.tokens.num_output == sequence.request.params.max_tokens
            or sequence.tokens.ids[-1] in sequence.request.eos_token_ids
        )

    num_begun = 0
    with tqdm(total=num_tokens, desc="answering", unit="token", file=sys.stderr, mininterval=0.5) as bar:
        while True:
            while (
                scheduler.num_unfinished < AT_ONCE
                and len(token_ids) + scheduler.num_unfinished * LONGEST // 2 < num_tokens
            ):
                prompt = prompts[num_begun % len(prompts)]
                sampled |= {
                    "max_tokens": min(LONGEST, engine.max_model_len - len(prompt)),
                    "seed": sampling.seed + num_begun,
                }
                params = SamplingParams(**sampled)  # type: ignore[arg-type]
                scheduler.add(
                    Sequence(
                        Request(num_begun, str(num_begun), params, files.eos_token_ids, arrived_at=float(num_begun)),
                        Tokens(list(prompt)),
                    )
                )
                num_begun += 1
            if run_step(scheduler, decide, is_over=is_over) is None:
                break
            bar.update(min(len(token_ids), num_tokens) - bar.n)
    order = torch.tensor(numbers).argsort(stable=True)
    return Answers(torch.cat(states)[order], torch.tensor(token_ids)[order], torch.tensor(numbers)[order])
