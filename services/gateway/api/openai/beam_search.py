"""Beam search, as transformers has it: which beams go on, which answers are kept, and when no
better one can come. Pure; beams.py runs it.

A step takes of every running beam the likeliest next tokens. Of all continuations, by the sum of
their log probabilities, the best that do not end go on. One that ends (by an end token, or at the
length) is an answer, if it is among the first `width` continuations; its score is the sum divided
by length^length_penalty, and the best `width` answers are kept.

early_stopping: True ends as soon as there are `width` answers; False when the best beam, were it to
end now, would not be better than the worst answer; "never" when it could not become better at any
length. (transformers 5, generation/utils.py, `_beam_search`.)
"""

from dataclasses import dataclass, field
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # the sum of its tokens'


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: tuple[int, ...]  # without an end token
    score: float
    is_stopped: bool  # by an end token; else by the length
    num_tokens: int  # an end token among them


@dataclass(slots=True)
class BeamSearch:
    """One prompt's search. Its state is a function of the candidates that it was given."""

    width: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    answers: list[Hypothesis] = field(default_factory=list)  # the best first
    is_over: bool = False
    _length: int = 0

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens of each running beam a step needs."""
        return self.width + len(self.eos_token_ids)

    def advance(self, candidates: list[list[tuple[int, float]]]) -> None:
        """One step on. candidates: of each running beam its likeliest next tokens and their log
        probabilities, num_candidates of them."""
        found = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, tokens in zip(self.running, candidates, strict=True)
            for token_id, logprob in tokens
        ]
        found.sort(key=lambda each: -each.logprob)
        found = found[: max(2, 1 + len(self.eos_token_ids)) * self.width]
        self._length += 1
        is_last = self._length >= self.max_tokens
        for each in found[: self.width]:
            if is_last or each.token_ids[-1] in self.eos_token_ids:
                self._keep(each)
        self.answers = sorted(self.answers, key=lambda each: -each.score)[: self.width]
        self.running = [each for each in found if each.token_ids[-1] not in self.eos_token_ids][: self.width]
        is_full = len(self.answers) == self.width
        self.is_over = (
            is_last or not self.running or (is_full and (self.early_stopping is True or not self._can_improve()))
        )

    def _keep(self, beam: Beam) -> None:
        is_stopped = beam.token_ids[-1] in self.eos_token_ids
        own = beam.token_ids[:-1] if is_stopped else beam.token_ids
        self.answers.append(
            Hypothesis(own, beam.logprob / self._length**self.length_penalty, is_stopped, len(beam.token_ids))
        )

    def _can_improve(self) -> bool:
        """Whether the best running beam may become better than the worst answer, as far as
        early_stopping wants to know."""
        is_patient = self.early_stopping == "never" and self.length_penalty > 0.0
        length = self.max_tokens if is_patient else self._length
        possible: float = self.running[0].logprob / length**self.length_penalty
        return possible > self.answers[-1].score
