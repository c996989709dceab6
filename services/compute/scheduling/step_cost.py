"""StepCost: how long a step takes, learned from the steps that were measured."""

from dataclasses import dataclass

import numpy as np

from shared.model.arrays import Array

MIN_STEPS = 8  # before a fit is worth using
REFIT_EVERY = 16
FORGET = 0.995  # weight of a step against the one after it: the last few hundred count


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds = fixed_s + per_token_s * tokens computed + per_context_token_s * tokens whose KV is
    read."""

    fixed_s: float
    per_token_s: float
    per_context_token_s: float

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.fixed_s + self.per_token_s * num_tokens + self.per_context_token_s * num_context_tokens

    def tokens_within(self, seconds: float, num_context_tokens: int) -> int:
        """How many tokens a step that must not take longer than `seconds` may compute; may be below
        0."""
        left = seconds - self.fixed_s - self.per_context_token_s * num_context_tokens
        return int(left / max(self.per_token_s, 1e-12))


class StepCostFit:
    """Least squares on the relative error of recent steps, no coefficient below 0."""

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._num_steps = 0
        self.cost: StepCost | None = None  # None until enough steps were seen

    @property
    def token_s(self) -> float | None:
        """Seconds that a token adds to a step."""
        return None if self.cost is None else self.cost.per_token_s

    def observe(self, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        row = np.array([1.0, num_tokens, num_context_tokens]) / seconds
        self._gram = FORGET * self._gram + np.outer(row, row)
        self._moment = FORGET * self._moment + row
        self._num_steps += 1
        if self._num_steps == MIN_STEPS or self._num_steps % REFIT_EVERY == 0:
            self.cost = StepCost(*map(float, self._solve()))

    def _solve(self) -> Array:
        """The normal equations; a coefficient that comes out negative is taken out, and the rest
        solved again."""
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-300))
        used = [0, 1, 2]
        while True:
            gram = (self._gram / np.outer(scale, scale))[np.ix_(used, used)] + 1e-9 * np.eye(len(used))
            solution = np.linalg.solve(gram, (self._moment / scale)[used])
            if solution.min() >= 0 or len(used) == 1:
                break
            used.pop(int(solution.argmin()))
        result = np.zeros(3)
        result[used] = np.maximum(solution, 0.0) / scale[used]
        return result
