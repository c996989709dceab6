"""Edits of rows of logits, as their requests ask for them. They are gathered row by row on the host, and
applied to all rows at once: a device gets a few operations a step, however many rows are edited.

The order in a row is fixed: the repetition penalty (Keskar et al., "CTRL", 2019, section 4.1) over prompt
and output; frequency and presence over the output, as OpenAI defines them; the bias; DRY; then what is
not allowed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch

from services.compute.backends.backend import RowSearch
from services.compute.backends.buffers import to_device
from services.compute.candidates.dry import dry_penalties
from services.compute.candidates.row_mask import allowed_tokens, banned_tokens
from services.compute.sequence import Prefix
from shared.model.arrays import Array


class EditKind(IntEnum):
    """Edits of single tokens, in the order in which they are applied. Each has an amount."""

    REPETITION = 0  # divides logits above 0, multiplies the others
    OUTPUT = 1  # is taken off
    BIAS = 2  # is added
    DRY = 3  # is taken off
    BANNED = 4  # minus infinity, whatever the amount


# by kind, in their order: token ids, int64, each once where it has an amount; amounts, float32, as long
# or [1]
TokenEdits = dict[EditKind, tuple[Array, Array]]


@dataclass(slots=True)
class RowEdits:
    """A row's edits."""

    tokens: TokenEdits = field(default_factory=dict)
    mask: Array | None = None  # of row_mask.py: which tokens stay

    def add(self, kind: EditKind, token_ids: Array, amounts: Array, vocab_size: int) -> None:
        """Raises IndexError for a token that the vocabulary lacks."""
        if len(token_ids):
            if (wrong := token_ids.max()) >= vocab_size or (wrong := token_ids.min()) < 0:
                raise IndexError(f"token {wrong} is out of bounds: the vocabulary has {vocab_size}")
            self.tokens[kind] = token_ids, amounts


NO_AMOUNT = np.zeros(1, np.float32)


def edits_of(prefix: Prefix, grammar_mask: Array | None, vocab_size: int) -> RowEdits:
    """The edits of the row of the token after the prefix, but for llama.cpp's chain. grammar_mask: of
    row_mask.py, what its grammar allows. Raises Invalid if nothing is allowed, IndexError."""
    sequence, num_tokens = prefix.sequence, prefix.num_tokens
    params, edits = sequence.request.params, RowEdits()
    if params.edits_logits:
        if params.repetition_penalty != 1.0:
            seen = sequence.tokens.seen_counts(num_tokens).token_ids
            edits.add(EditKind.REPETITION, seen, np.array([params.repetition_penalty], np.float32), vocab_size)
        if (params.frequency_penalty or params.presence_penalty) and prefix.num_output_tokens:
            counts = sequence.tokens.output_counts(num_tokens)
            amounts = np.float32(params.frequency_penalty) * counts.times + np.float32(params.presence_penalty)
            edits.add(EditKind.OUTPUT, counts.token_ids, amounts, vocab_size)
        if params.logit_bias:
            biased, biases = (
                np.array(list(params.logit_bias), np.int64),
                np.array(list(params.logit_bias.values()), np.float32),
            )
            edits.add(EditKind.BIAS, biased, biases, vocab_size)
    if params.dry is not None and params.dry.multiplier > 0.0:
        edits.add(
            EditKind.DRY,
            *dry_penalties(sequence.history(num_tokens), params.dry, sequence.request.dry_breakers),
            vocab_size,
        )
    edits.mask = allowed_tokens(prefix, grammar_mask, vocab_size)
    if edits.mask is None and (banned := banned_tokens(prefix)):
        edits.add(EditKind.BANNED, np.array(banned, np.int64), NO_AMOUNT, vocab_size)
    return edits


def apply_edits(logits: torch.Tensor, edits: Mapping[int, RowEdits], search: RowSearch) -> None:
    """Edit rows of logits [R, vocab] float32, in place, and do not wait for the device. edits: by row;
    search: of the logits' device."""
    if edited := {row: each.tokens for row, each in edits.items() if each.tokens}:
        edit = edit_on_host if logits.device.type == "cpu" else edit_on_device
        edit(logits, edited)
    if masked := {row: each.mask for row, each in edits.items() if each.mask is not None}:
        search.ban(logits, np.array(list(masked), np.int64), list(masked.values()))


def edit_on_host(logits: torch.Tensor, edits: Mapping[int, TokenEdits]) -> None:
    """Row by row, in numpy: of few tokens it takes less time than one call of torch."""
    numbers = logits.numpy()
    with np.errstate(all="ignore"):  # what is not finite fails when it is searched
        for row, kinds in edits.items():
            logits_of_row = numbers[row]
            for kind, (token_ids, amounts) in kinds.items():
                values = logits_of_row[token_ids]
                if kind == EditKind.REPETITION:
                    values = np.where(values > 0, values / amounts, values * amounts)
                elif kind == EditKind.BANNED:
                    values = -np.inf
                else:
                    values = values + amounts if kind == EditKind.BIAS else values - amounts
                logits_of_row[token_ids] = values


def edit_on_device(logits: torch.Tensor, edits: Mapping[int, TokenEdits]) -> None:
    """All rows' tokens of a kind at once. The numbers cross in two copies."""
    vocab_size, flat = logits.shape[1], logits.view(-1)
    of_kinds = [[(row, *kinds[kind]) for row, kinds in edits.items() if kind in kinds] for kind in EditKind]
    parts = [part for of_kind in of_kinds for part in of_kind]
    all_places = to_device(np.concatenate([token_ids + row * vocab_size for row, token_ids, _ in parts]), logits.device)
    all_amounts = to_device(
        np.concatenate([np.broadcast_to(each, token_ids.shape) for _, token_ids, each in parts]), logits.device
    )
    sizes = [sum(len(token_ids) for _, token_ids, _ in of_kind) for of_kind in of_kinds]
    for kind, places, amounts in zip(
        EditKind, torch.split(all_places, sizes), torch.split(all_amounts, sizes), strict=True
    ):
        if kind == EditKind.BANNED:
            flat.index_fill_(0, places, -torch.inf)
        elif len(places):
            values = flat[places]
            if kind == EditKind.REPETITION:
                values = torch.where(values > 0, values / amounts, values * amounts)
            else:
                values = values + amounts if kind == EditKind.BIAS else values - amounts
            flat[places] = values
