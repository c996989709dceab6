"""Penalties follow a sequence token by token: the same bits as from its whole history, and a step costs what is new."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.backends.torch.row_search import TorchRowSearch
from services.compute.candidates.dry import dry_penalties
from services.compute.candidates.edits import EditKind, TokenEdits, apply_edits, edit_on_device, edit_on_host, edits_of
from services.compute.sequence import Request, Sequence, Tokens
from shared.model.sampling_params import DryParams, SamplingParams

VOCABULARY = 40
PARAMS = SamplingParams(
    max_tokens=1000,
    repetition_penalty=1.3,
    frequency_penalty=0.25,
    presence_penalty=-0.5,
    logit_bias={3: 1.7, 38: -0.3},
    dry=DryParams(0.8, allowed_length=1),
)


def edit(rows: torch.Tensor, sequences: list[Sequence]) -> None:
    apply_edits(
        rows, {row: edits_of(each.prefix(), None, VOCABULARY) for row, each in enumerate(sequences)}, TorchRowSearch()
    )


def from_the_whole_history(row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The same penalties by their definitions."""
    row, params = row.clone(), sequence.request.params
    seen = torch.tensor(sorted(set(sequence.tokens.ids)))
    values = row[seen]
    row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    for token_id in sorted(set(output := sequence.tokens.ids[sequence.tokens.num_prompt :])):
        row[token_id] -= (
            torch.tensor(output.count(token_id), dtype=torch.float32) * params.frequency_penalty
            + params.presence_penalty
        )
    for token_id, bias in params.logit_bias.items():
        row[token_id] += torch.tensor(bias, dtype=torch.float32)
    assert params.dry is not None
    tokens, penalties = dry_penalties(np.array(sequence.tokens.ids, np.int64), params.dry, {})
    row[torch.from_numpy(tokens)] -= torch.from_numpy(penalties)
    return row


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=90),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=40), st.integers(0, 30)), min_size=1, max_size=8
    ),
)
def test_edits_are_the_same_bits_as_from_the_whole_history(
    prompt: list[int], steps: list[tuple[list[int], int]]
) -> None:
    """Tokens come, some foreseen ones go again, and after each step the row is edited, beside another's."""
    sequence, other = (Sequence(Request(handle, "r", PARAMS), Tokens(list(prompt))) for handle in range(2))
    row = torch.linspace(-3, 3, VOCABULARY)
    for added, num_dropped in steps:
        for token_id in added:
            sequence.tokens.foresee(token_id)
        edit(row.repeat(1, 1), [sequence])
        sequence.tokens.truncate(max(len(prompt), len(sequence.tokens) - num_dropped))
        edited = row.repeat(2, 1)
        edit(edited, [other, sequence])
        for found, each in zip(edited, (other, sequence), strict=True):
            assert found.numpy().tobytes() == from_the_whole_history(row, each).numpy().tobytes()


def test_a_long_history_is_read_once() -> None:
    """A token costs the same after 1,000 tokens and after 100,000, but for the numpy work on what
    is there: the list is not walked again.
    """

    class Watched(list[int]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Watched.num_read += len(found) if isinstance(index, slice) else 1
            return found

        def __iter__(self) -> Any:
            Watched.num_read += len(self)
            return super().__iter__()

    rng = np.random.default_rng(0)
    sequence = Sequence(Request(1, "r", PARAMS), Tokens(Watched(rng.integers(0, VOCABULARY, 20_000).tolist()), 20_000))
    row = torch.zeros(VOCABULARY)
    edit(row.repeat(1, 1), [sequence])
    Watched.num_read = 0
    for token_id in range(10):
        sequence.tokens.append(token_id)
        edit(row.repeat(1, 1), [sequence])
    assert Watched.num_read < 100


AMOUNTS = st.floats(-2, 2, width=32)


@st.composite
def token_edits(draw: st.DrawFn) -> TokenEdits:
    edits: TokenEdits = {}
    for kind in draw(st.sets(st.sampled_from(EditKind))):
        token_ids = np.array(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, unique=True)), np.int64)
        amounts = draw(
            st.lists(AMOUNTS, min_size=1, max_size=1)
            | st.lists(AMOUNTS, min_size=len(token_ids), max_size=len(token_ids))
        )
        edits[kind] = token_ids, np.array(amounts, np.float32)
    return {kind: edits[kind] for kind in sorted(edits)}


@given(edits=st.dictionaries(st.integers(0, 3), token_edits(), min_size=1).filter(lambda edits: any(edits.values())))
def test_a_device_edits_all_rows_as_the_host_edits_each(edits: dict[int, TokenEdits]) -> None:
    on_host = torch.linspace(-3, 3, 4 * VOCABULARY).view(4, VOCABULARY)
    on_device = on_host.clone()
    edit_on_host(on_host, edits)
    edit_on_device(on_device, edits)
    assert torch.equal(on_host.view(torch.int32), on_device.view(torch.int32))
