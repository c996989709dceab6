"""CandidateRows: the rows of one step, from their logits to what samplers are asked to decide."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from services.compute.sequence import Prefix, RowKey
from shared.model.arrays import Array
from shared.wire.messages import RequestError, SequenceIntro, StepCandidates

REQUESTS_OWN = -1.0  # a row's temperature, where it is its request's


@dataclass(slots=True)
class CandidateRows:
    """The undecided rows of one step, all sequences together; `message` has some of them for a
    sampler. `new_rows` makes them, a reduction fills them in; after that they stay as they are."""

    handles: Array  # [R] int32
    positions: Array  # [R] int32: in the token log, of the token to be decided
    # [R] int32: the token at the position before, which this row was computed on; -1: it is the first.
    # The sequence may have lost it when the candidates are read
    previous_token_ids: Array
    counts: Array  # [R] int32: listed candidates
    token_ids: Array  # [R, K] int32, K = max(counts) or more
    logits: Array  # [R, K] float32, -inf beyond a row's count
    logsumexp: Array  # [R] float32, of rows with logprobs; 0 elsewhere
    num_kept: Array  # [R] int32: listed candidates that take part in the draw
    tail_mass: Array  # [R] float64, of the kept tokens beyond the list; 0: none
    tail_token_ids: Array  # [R] int32: the token of the tail, where that wins the draw; -1 elsewhere
    tail_logits: Array  # [R] float32, its logit
    chosen: Array  # [R] int32: what the sampler will decide
    temperatures: Array  # [R] float32, where they depend on the row; REQUESTS_OWN elsewhere
    failures: dict[RowKey, RequestError] = field(default_factory=dict)  # rows that are not here

    @property
    def keys(self) -> list[RowKey]:
        """[R]."""
        return list(map(RowKey, self.handles.tolist(), self.positions.tolist()))

    def only(self, rows: list[int]) -> "CandidateRows":
        """Some of the rows, without failures."""
        return CandidateRows(
            **{each.name: getattr(self, each.name)[rows] for each in fields(self) if each.name != "failures"}
        )

    def message(
        self, rows: list[int], compute_id: str, step: int, intros: tuple[SequenceIntro, ...], forget: list[int]
    ) -> StepCandidates:
        """The message with these rows."""
        counts = self.counts[rows]
        is_listed = np.arange(self.token_ids.shape[1]) < counts[:, None]
        return StepCandidates(
            compute_id=compute_id,
            step=step,
            intros=intros,
            forget=np.array(forget, np.int32),
            handles=self.handles[rows],
            positions=self.positions[rows],
            counts=counts,
            token_ids=self.token_ids[rows][is_listed],
            logits=self.logits[rows][is_listed],
            logsumexp=self.logsumexp[rows],
            num_kept=self.num_kept[rows],
            tail_mass=self.tail_mass[rows],
            tail_token_ids=self.tail_token_ids[rows],
            tail_logits=self.tail_logits[rows],
            previous_token_ids=self.previous_token_ids[rows],
            temperatures=self.temperatures[rows]
            if (self.temperatures[rows] != REQUESTS_OWN).any()
            else self.temperatures[:0],
        )


def new_rows(handles: Array, positions: Array, previous_token_ids: Array) -> CandidateRows:
    """Rows [R] int32 with one candidate each, token 0, which wins: what a reduction begins with."""
    count = len(handles)
    return CandidateRows(
        handles=handles,
        positions=positions,
        previous_token_ids=previous_token_ids,
        counts=np.ones(count, np.int32),
        token_ids=np.zeros((count, 1), np.int32),
        logits=np.zeros((count, 1), np.float32),
        logsumexp=np.zeros(count, np.float32),
        num_kept=np.ones(count, np.int32),
        tail_mass=np.zeros(count),
        tail_token_ids=np.full(count, -1, np.int32),
        tail_logits=np.zeros(count, np.float32),
        chosen=np.zeros(count, np.int32),
        temperatures=np.full(count, REQUESTS_OWN, np.float32),
    )


def rows_after(prefixes: list[Prefix]) -> CandidateRows:
    """New rows of the tokens after these prefixes."""
    return new_rows(
        np.array([prefix.sequence.handle for prefix in prefixes], np.int32),
        np.array([prefix.position for prefix in prefixes], np.int32),
        np.array([prefix.previous_token_id for prefix in prefixes], np.int32),
    )


def gather(chosen: list[tuple[CandidateRows, list[int]]]) -> CandidateRows:
    """Join some rows of some steps: those of each sequence in the order of their positions."""
    first, indices = chosen[0]
    if len(chosen) == 1 and len(indices) == len(first.handles):
        return first
    width = max(rows.token_ids.shape[1] for rows, _ in chosen)
    order = np.argsort(np.concatenate([rows.positions[indices] for rows, indices in chosen]), kind="stable")

    def stack(name: str) -> Any:
        columns = [getattr(rows, name)[indices] for rows, indices in chosen]
        if columns[0].ndim == 2:
            columns = [
                column if column.shape[1] == width else np.pad(column, ((0, 0), (0, width - column.shape[1])))
                for column in columns
            ]
        return np.concatenate(columns)[order]

    return CandidateRows(**{each.name: stack(each.name) for each in fields(CandidateRows) if each.name != "failures"})
