"""Draws from candidate sets, by way of the wire: what a sampler decides, one step at a time, and
many draws from one row at once.
"""

import numpy as np
import torch
from msgspec import structs

from services.compute.backends.backend import RowSearch
from services.compute.candidates.draw import place_of, within_tail
from services.compute.candidates.reduction import reduce
from services.compute.candidates.rows import CandidateRows
from services.compute.candidates.truncation import cumulative_mass
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.arrays import Array
from shared.model.decision import Draws, decide, pad, pick
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import StepCandidates, decode, encode

POSITIONS = 500  # of a request, as far as draws differ in them
COMPARED = 64  # draws of lists, and of tails, that are made one by one as well


def sent(rows: CandidateRows, which: list[int]) -> StepCandidates:
    """Some of the rows, as they come out of the wire."""
    return decode(StepCandidates, encode(rows.message(which, "c", 1, (), [])))


def decided(step: StepCandidates, sequences: list[Sequence]) -> Array:
    """A sampler's decisions: it knows the requests' parameters, and of the row what the message says."""
    seeds = np.array([sequence.request.params.seed for sequence in sequences], np.uint64)
    temperatures = np.array([sequence.request.params.temperature for sequence in sequences])
    if len(step.temperatures):
        temperatures = np.where(step.temperatures >= 0, step.temperatures, temperatures)
    logits, token_ids = pad(step.logits, step.counts, -np.inf), pad(step.token_ids, step.counts, 0)
    columns = decide(Draws(logits, token_ids, step.num_kept, step.tail_mass, temperatures, seeds, step.positions))
    assert (step.tail_token_ids[columns >= step.counts] >= 0).all()
    return pick(columns, step.counts, token_ids, step.tail_token_ids, step.tail_token_ids)


def draw_many(
    logits: torch.Tensor, params: SamplingParams, num_draws: int, search: RowSearch, output: list[int] | None = None
) -> Array:
    """Tokens drawn from one row of logits [vocab] after the prompt 7, 8 and the output, for other
    seeds and positions: the row is reduced once. Of a request whose history matters only the seeds
    differ. Some draws are made again one by one, with reductions of their own: they are the same."""
    numbers = np.arange(num_draws)
    has_history = output is not None
    seeds = (
        numbers.astype(np.uint64) if has_history else (numbers // POSITIONS).astype(np.uint64) + np.uint64(params.seed)
    )
    positions = (
        np.full(num_draws, len(output or []) + 1, np.int32)
        if has_history
        else (numbers % POSITIONS + 1).astype(np.int32)
    )
    edited = logits[None].clone()
    step = sent(reduce(edited, [Sequence(Request(0, "r", params), Tokens([7, 8, *(output or [])], 2))], search), [0])
    temperature = step.temperatures[0] if len(step.temperatures) and step.temperatures[0] >= 0 else params.temperature
    count, tail_mass = int(step.counts[0]), np.repeat(step.tail_mass, num_draws)
    columns = decide(
        Draws(
            np.broadcast_to(step.logits, (num_draws, count)),
            np.broadcast_to(step.token_ids, (num_draws, count)),
            np.repeat(step.num_kept, num_draws),
            tail_mass,
            np.full(num_draws, float(temperature)),
            seeds,
            positions,
        )
    )
    won = np.flatnonzero(columns == count)
    row = edited[0].numpy()
    order = np.lexsort((np.arange(len(row)), -row))
    mass = cumulative_mass(row[order][None], np.array([temperature]))[0]
    tokens = np.append(step.token_ids, -1)[columns]
    tokens[won] = order[
        place_of(mass, within_tail(np.full(len(won), mass[count - 1]), tail_mass[won], seeds[won], positions[won]))
    ]
    some = np.union1d(numbers[:COMPARED], won[:COMPARED])
    sequences = [
        Sequence(
            Request(row, "r", structs.replace(params, seed=int(seeds[draw]))),
            Tokens([7, 8, *(output if output is not None else [0] * (positions[draw] - 1))], 2),
        )
        for row, draw in enumerate(some)
    ]
    rows = reduce(logits.repeat(len(some), 1), sequences, search)
    assert (
        rows.chosen.tolist() == decided(sent(rows, list(range(len(some)))), sequences).tolist() == tokens[some].tolist()
    )
    return tokens
