"""Drafts by Medusa heads (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", 2024): from the hidden state that the model's head draws a token of, head
i guesses the token i + 1 places after it.

A head sees no draft before its own, so it gives the tokens that are likely there on the average.
All heads run at once, and their guesses are one chain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from services.compute.backends.backend import Backend, LogitsProduct, RowSearch, Workspace
from services.compute.backends.matrix import Dense
from services.compute.candidates.reduction import LISTED
from services.compute.candidates.truncation import cumulative_mass, kept_count
from services.compute.execution.executor import Executor
from services.compute.sequence import RowKey
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.medusa_file import HeadWeights
from services.compute.speculation.proposer import Drafts, Wanted
from shared.model.arrays import Array
from shared.model.decision import Draws
from shared.model.sampling_params import SamplingParams

AT_ONCE = 16  # sequences, whose logits are in memory together
MIN_CHANCE = 0.15  # that the heads give a chain to stand as far as a draft; one with less is left out


class MedusaHeads:
    """Heads on a backend."""

    def __init__(self, weights: HeadWeights, own_head: LogitsProduct, vocab_size: int, backend: Backend) -> None:
        """own_head: the model's, for heads that bring none; vocab_size: of that one."""
        self.dtype = backend.dtype
        self.num_rows = len(weights.lm_heads[0]) if weights.lm_heads else vocab_size
        self.blocks = [[backend.make_linear(Dense(weight), bias) for weight, bias in head] for head in weights.blocks]
        self.lm_heads: list[LogitsProduct] = [backend.make_linear(Dense(weight)) for weight in weights.lm_heads] or [
            own_head
        ]
        self.token_ids = None if weights.token_ids is None else weights.token_ids.numpy()

    def __len__(self) -> int:
        return len(self.blocks)

    def workspace(self, num_tokens: int, max_model_len: int) -> Workspace:  # noqa: ARG002
        """Bytes of the logits, and as many again for the search in them."""
        return Workspace(0, 2 * AT_ONCE * len(self) * self.num_rows * 4)

    @torch.inference_mode()
    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits of the first `depth` heads, [R * depth, V] float32, a state's heads one after the
        other; good until the next call. states: [R, hidden], behind the last norm."""
        x = states.to(self.dtype)
        guesses = []
        for head in self.blocks[:depth]:
            y = x
            for linear in head:
                y = y + silu(linear(y))
            guesses.append(y)
        if len(self.lm_heads) == 1:
            return self.lm_heads[0].logits(torch.stack(guesses, 1).flatten(0, 1))
        logits = [lm_head.logits(y) for lm_head, y in zip(self.lm_heads, guesses, strict=False)]
        return torch.stack(logits, 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LastState:
    """The hidden state from which a sequence's last token was drawn."""

    num_tokens: int  # of the sequence, that token included
    state: Tensor  # [hidden] float32


class MedusaProposer:
    """A Proposer."""

    name = "medusa"
    needs_hidden = True
    runs_model = True
    stops_itself = False

    def __init__(self, heads: MedusaHeads, executor: Executor, row_search: RowSearch) -> None:
        self.heads = heads
        self.executor = executor
        self.row_search = row_search
        self._states: dict[int, LastState] = {}  # by handle

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        keys: list[RowKey] = []
        lengths: list[int] = []
        for row in batch.rows:
            count = decided.get(row.handle, 0)
            if count:
                keys.append(row.decides[count - 1])
                lengths.append(row.num_computed_tokens + row.sampled[count - 1] + 2)
        if keys:
            states = self.executor.sampled_states(batch, hidden, set(keys))
            self._states.update(
                {
                    key.handle: LastState(length, state.clone())
                    for key, length, state in zip(keys, lengths, states, strict=True)
                }
            )

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        known = [
            each
            for handle, each in wanted.items()
            if (last := self._states.get(handle)) and last.num_tokens == len(each.sequence.tokens)
        ]
        drafts: dict[int, Drafts] = {}
        for at in range(0, len(known), AT_ONCE):
            drafts |= self._propose(known[at : at + AT_ONCE])
        return drafts

    def forget(self, handle: int) -> None:
        self._states.pop(handle, None)

    def _propose(self, wanted: list[Wanted]) -> dict[int, Drafts]:
        depth = min(len(self.heads), max(each.max_drafts for each in wanted))
        states = torch.stack([self._states[each.sequence.handle].state for each in wanted])
        logits = self.heads.logits(states, depth)
        positions = [each.sequence.next_position + number for each in wanted for number in range(depth)]
        params = [each.sequence.request.params for each in wanted for _ in range(depth)]
        guessed = guess(logits, params, positions, self.heads.token_ids, self.row_search)
        chances = guessed.chances.reshape(-1, depth).cumprod(1)
        lengths = (chances >= MIN_CHANCE).sum(1).tolist()
        found = zip(wanted, guessed.token_ids.reshape(-1, depth).tolist(), lengths, strict=True)
        return {
            each.sequence.handle: Drafts(token_ids[: min(length, each.max_drafts)])
            for each, token_ids, length in found
            if length
        }


@dataclass(frozen=True, slots=True)
class Guesses:
    """The tokens that heads guess, by row of their logits."""

    token_ids: Array  # [R] int64
    chances: Array  # [R] float64: what the head gives the token to be drawn


def guess(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Array | None,
    search: RowSearch,
) -> Guesses:
    """Draw a token from each row of logits [R, V], as the model's own rows are drawn: with the
    request's parameters, and with the noise of seed, position and token. So where a head is near the
    model's distribution, it mostly draws the model's token.

    Edits of rows are left out, and what a list of LISTED tokens leaves over. token_ids: [V], of the
    rows' columns; None: themselves.
    """
    values, columns = search.find_largest(logits, min(LISTED, logits.shape[1]))
    listed = columns if token_ids is None else token_ids[columns]
    temperatures = np.array([1.0 if each.is_greedy else each.temperature for each in params])
    masses = cumulative_mass(values, temperatures)
    num_kept = [
        1 if each.is_greedy else kept_count(mass, each, row, float(mass[-1]))
        for each, mass, row in zip(params, masses, values, strict=True)
    ]
    draws = Draws(
        values,
        listed.astype(np.int32),
        np.array(num_kept, np.int32),
        np.zeros(len(values)),
        temperatures,
        np.array([each.seed for each in params], np.uint64),
        np.array(positions, np.int32),
    )
    rows, chosen = np.arange(len(values)), search.decide(draws)
    # the noise has chosen it, so it says more of the token than its weight alone: the likeliest
    # one's weight is what says how sure the head is
    return Guesses(listed[rows, chosen], 1.0 / masses[:, -1])
