"""ModelRunner: a ScheduledBatch becomes tensors, runs through the model, and comes back as
logits."""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from services.compute.backends.backend import Backend, LayerCache, RowSearch, Workspace
from services.compute.backends.buffers import to_device
from services.compute.backends.torch.recurrent import StateRows
from services.compute.cache.kv_cache import CacheShape, KVCache
from services.compute.cache.state_cache import StateCache
from services.compute.execution.executor import DrawnTokens
from services.compute.models.decoder import Decoder, ForwardBatch, Overlay
from services.compute.sequence import PENDING, RowKey
from services.compute.sequence.batch import ScheduledBatch


class ModelShape(CacheShape, Protocol):
    @property
    def vocab_size(self) -> int: ...


class Model(Protocol):
    """A model that runs a step: our own Decoder, or transformers' modules."""

    @property
    def config(self) -> ModelShape: ...

    @property
    def implementation(self) -> str:
        """The implementation's name, for the log."""
        ...

    @property
    def backend(self) -> Backend:
        """The backend of the model's parts and of its cache."""
        ...

    @property
    def splits_prompts(self) -> bool:
        """Whether a prompt may be computed in parts: not if its tokens see those after them. Such a
        model samples nothing."""
        ...

    @property
    def takes_segments(self) -> bool:
        """Whether it passes over holes, and rotates tokens to any positions."""
        ...

    @property
    def finds_slots(self) -> bool:
        """Whether it needs no slot_mapping: it finds slots from the block tables."""
        ...

    @property
    def is_row_invariant(self) -> bool:
        """Whether a token's bits are the same alone and in a chunk of its sequence."""
        ...

    @property
    def longest_text(self) -> int | None:
        """The longest text in tokens, where the model itself bounds it otherwise than config.json
        says."""
        ...

    @property
    def has_kv(self) -> bool:
        """Whether its tokens have keys and values: else blocks account for lengths alone, and hold next to nothing."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes that a running sequence needs in addition to its keys and values, of states."""
        ...

    def workspace(self, num_tokens: int, num_logits: int, max_model_len: int) -> Workspace:
        """Bytes that a step of so many tokens needs. num_logits: rows that get logits."""
        ...

    def plan(self, batch: ForwardBatch, block_size: int) -> Any:
        """Prepare what depends on the batch and is the same for every layer."""
        ...

    def forward(self, batch: ForwardBatch, plan: Any, caches: Sequence[Any]) -> torch.Tensor:
        """Write the step's K and V to KVCache.layers, and its states. Returns what `logits` makes logits of."""
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits of some of the batch's logit_rows, [R, vocab] float32, good until the next call.
        hidden: what `forward` returned."""
        ...

    def states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states of some of the batch's logit_rows, behind the last norm, [R, hidden]
        float32."""
        ...


# of a prompt, whose logits are there at a time: those of a chunk of 512 would be 311 MB at a
# vocabulary of 151,936
PROMPT_ROWS = 64
NO_IMAGES: Mapping[str, torch.Tensor] = MappingProxyType({})


class ModelRunner:
    """The Executor of a model in this process."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        row_search: RowSearch | None = None,
        images: Mapping[str, torch.Tensor] | None = NO_IMAGES,
        num_slots: int = 0,
    ) -> None:
        """row_search: the model's backend's, if none is given; images: embeddings of those in the
        batches, by key, [tokens, hidden]; None: another rank has them; num_slots: of states, if the model
        keeps some."""
        self.model = model
        self.images = images
        self.kv_cache = kv_cache
        self.caches: Sequence[LayerCache] = kv_cache.layers
        if isinstance(model, Decoder) and model.recurrence is not None:
            self.caches = StateCache(model.config, model.backend, num_slots).among(kv_cache.layers)
        self.row_search = row_search or model.backend.row_search
        self.buffers = model.backend.buffers
        # the last step's logit_rows
        self._prepared: tuple[list[int], torch.Tensor] = [], torch.zeros(0, dtype=torch.int64)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step. Returns the logits [len(batch.sampled), vocab_size] float32, in that
        order."""
        return self.logits(batch, self.run(batch))

    def run(self, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> Any:
        """Run one step up to the head: prepare it, then a forward pass that reads nothing else of
        the batch. Returns what `logits` and `prompt_logits` take.

        drawn: has the tokens that are PENDING in the batch.
        """
        if batch.block_copies:
            self.kv_cache.copy_blocks(batch.block_copies)
        return self.model.forward(*self.prepare(batch, drawn), self.caches)

    def logits(
        self, batch: ScheduledBatch, hidden: torch.Tensor, keys: Container[RowKey] | None = None
    ) -> torch.Tensor:
        """Logits of the sampled rows, [len(batch.sampled), vocab_size] float32, in that order; good
        until the head runs again. hidden: what `run` returned; keys: of the rows that are still
        wanted, where some are not."""
        return self.model.logits(hidden, self._wanted(_wanted_rows(batch, keys)))

    def prompt_logits(self, batch: ScheduledBatch, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of the rows that predict the batch's target_ids, in their order: slices of [at
        most PROMPT_ROWS, vocab_size] float32, each good until the next."""
        rows = _prompt_rows(batch)
        for at in range(0, len(rows), PROMPT_ROWS):
            yield self.model.logits(hidden, self._wanted(rows[at : at + PROMPT_ROWS]))

    def sampled_states(
        self, batch: ScheduledBatch, hidden: torch.Tensor, keys: Container[RowKey] | None = None
    ) -> torch.Tensor:
        """The last hidden states of the sampled rows, as `logits` has them: [R, hidden] float32."""
        return self.model.states(hidden, self._wanted(_wanted_rows(batch, keys)))

    def tapped_states(self, batch: ScheduledBatch, hidden: Any, rows: Sequence[int]) -> torch.Tensor:
        """The inputs of the model's tapped layers, for some of the batch's tokens:
        [rows, layers * hidden], a copy. Of the last step; with stages, of the one that `hidden` is of."""
        assert isinstance(self.model, Decoder)
        return self.model.tapped_states(hidden, batch.num_tokens)[
            to_device(np.array(rows, np.int64), self.buffers.device)
        ]

    def pooled_states(self, batch: ScheduledBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The last hidden states of the rows' pooled tokens, in their order, [R, hidden]
        float32."""
        return self.model.states(hidden, self._wanted(_pooled_rows(batch))).cpu()

    def prepare(self, batch: ScheduledBatch, drawn: DrawnTokens | None = None) -> tuple[ForwardBatch, Any]:
        """The batch's tokens in its own order, decodes, then chunks; and the model's plan. Both are
        good until the next step is prepared: they are in the backend's buffers. What is PENDING is
        put in its place on the device."""
        block_size = self.kv_cache.block_size
        input_ids: list[int] = []
        positions: list[int] = []
        for row in batch.rows:
            input_ids.extend(row.token_ids if not row.images else [max(0, token_id) for token_id in row.token_ids])
            positions.extend(
                range(row.num_computed_tokens + row.position_shift, row.num_context_tokens + row.position_shift)
            )
        logit_rows = sorted({*_sampled_rows(batch), *_prompt_rows(batch), *_pooled_rows(batch)})
        prepared = ForwardBatch(
            input_ids=self.buffers.fill("input_ids", input_ids),
            positions=self._positions(batch, positions),
            slot_mapping=self.buffers.fill(
                "slot_mapping", [] if self.model.finds_slots else slots_of(batch, block_size)
            ),
            query_lens=[row.num_tokens for row in batch.rows],
            context_lens=[row.num_context_tokens for row in batch.rows],
            block_tables=[row.block_table for row in batch.rows],
            block_lens=block_lens_of(batch, block_size),
            logit_rows=self.buffers.fill("logit_rows", logit_rows),
            overlay=self._overlay(batch),
            last_seen=last_seen_of(batch),
            handles=[row.handle for row in batch.rows],
            states=state_rows_of(batch) if self.model.state_bytes else None,
        )
        self._prepared = logit_rows, prepared.logit_rows
        plan = self.model.plan(prepared, block_size)
        self.buffers.upload()
        if drawn is not None:
            _feed(prepared.input_ids, batch, drawn)
        return prepared, plan

    def _positions(self, batch: ScheduledBatch, places: list[int]) -> torch.Tensor:
        """ForwardBatch's positions. places: of tokens whose rows say nothing else."""
        if not any(row.positions for row in batch.rows):
            return self.buffers.fill("positions", places)
        axes: tuple[list[int], ...] = ([], [], [])
        for row, start in zip(batch.rows, _starts(batch), strict=True):
            for number, axis in enumerate(axes):
                axis.extend(row.positions[number] if row.positions else places[start : start + row.num_tokens])
        return self.buffers.fill("positions of images", [*axes[0], *axes[1], *axes[2]]).view(3, -1)

    def _overlay(self, batch: ScheduledBatch) -> Overlay | None:
        runs = [
            (start + run.start, run)
            for row, start in zip(batch.rows, _starts(batch), strict=True)
            for run in row.images
        ]
        if not runs or self.images is None:
            return None
        rows = np.concatenate([np.arange(first, first + run.count) for first, run in runs])
        values = torch.cat([self.images[run.key][run.row : run.row + run.count] for _, run in runs])
        return Overlay(to_device(rows, values.device), values)

    def _wanted(self, rows: list[int]) -> torch.Tensor:
        """Some of the last step's logit_rows. All of them are there already."""
        prepared, tensor = self._prepared
        return tensor if rows == prepared else to_device(np.array(rows, np.int64), tensor.device)


def slots_of(batch: ScheduledBatch, block_size: int) -> list[int]:
    """Where the keys and values of the batch's tokens go."""
    return [
        row.block_table[place // block_size] * block_size + place % block_size
        for row in batch.rows
        for place in range(row.num_computed_tokens, row.num_context_tokens)
    ]


def block_lens_of(batch: ScheduledBatch, block_size: int) -> list[tuple[int, ...]] | None:
    """AttentionInputs' block_lens."""
    if not any(row.block_lens for row in batch.rows):
        return None
    return [row.block_lens or (block_size,) * len(row.block_table) for row in batch.rows]


def state_rows_of(batch: ScheduledBatch) -> StateRows:
    """The batch's sequences, of a model that keeps states."""
    return StateRows(
        slots=[row.slot for row in batch.rows],
        query_lens=[row.num_tokens for row in batch.rows],
        starts=[row.num_computed_tokens for row in batch.rows],
        num_folded=[row.num_folded for row in batch.rows],
        fold_to=[row.fold_to for row in batch.rows],
    )


def last_seen_of(batch: ScheduledBatch) -> list[int] | None:
    """AttentionInputs' last_seen."""
    if not any(row.sees_whole_images and row.images for row in batch.rows):
        return None
    found: list[int] = []
    for row in batch.rows:
        own = list(range(row.num_computed_tokens, row.num_context_tokens))
        for run in row.images if row.sees_whole_images else ():
            own[run.start : run.end] = [row.num_computed_tokens + run.end - 1] * run.count
        found.extend(own)
    return found


@torch.inference_mode()
def _feed(input_ids: torch.Tensor, batch: ScheduledBatch, drawn: DrawnTokens) -> None:
    """Put the tokens that are PENDING in their places, on the device."""
    fed = [
        (start + index, drawn.rows[row.key(index)])
        for row, start in zip(batch.rows, _starts(batch), strict=True)
        if PENDING in row.token_ids
        for index, token_id in enumerate(row.token_ids)
        if token_id == PENDING
    ]
    if fed:
        places, sources = to_device(np.array(fed, np.int64).T.copy(), input_ids.device)
        input_ids[places] = drawn.token_ids[sources]


def _starts(batch: ScheduledBatch) -> list[int]:
    """Where each row's tokens begin among the batch's."""
    return [0, *accumulate([row.num_tokens for row in batch.rows[:-1]])]


def _sampled_rows(batch: ScheduledBatch) -> list[int]:
    """The tokens whose logits decide those after them."""
    return [start + index for row, start in zip(batch.rows, _starts(batch), strict=True) for index in row.sampled]


def _wanted_rows(batch: ScheduledBatch, keys: Container[RowKey] | None) -> list[int]:
    """The sampled rows of these keys; None: all sampled rows."""
    rows = _sampled_rows(batch)
    return rows if keys is None else [row for row, key in zip(rows, batch.sampled, strict=True) if key in keys]


def _prompt_rows(batch: ScheduledBatch) -> list[int]:
    """The tokens before the batch's target_ids."""
    rows: list[int] = []
    for row, start in zip(batch.rows, _starts(batch), strict=True):
        first = start + row.first_target - 1 - row.num_computed_tokens
        rows.extend(range(first, first + len(row.target_ids)))
    return rows


def _pooled_rows(batch: ScheduledBatch) -> list[int]:
    """The tokens whose hidden states are pooled."""
    return [start + index for row, start in zip(batch.rows, _starts(batch), strict=True) for index in row.pooled]
