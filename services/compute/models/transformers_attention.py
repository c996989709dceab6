"""Attention behind transformers' modules instead of its caches: attention over the paged cache of a
step, and the caches themselves.

Two ways; a model takes the first that it can:

* **ragged**: its layers call transformers' attention interface, under the name ATTENTION. All
tokens of a step are one row; each layer's K and V go to
  their slots, and each sequence attends to its own blocks. Who sees whom is the rule from which the
  library makes its masks, asked for the positions.
* **one by one**: its layers attend in code of their own, after handing K and V to a cache, or keep
states as well (recurrent_states.py). Each sequence of a step is a forward pass of its own, over
  a cache object that writes to the blocks and reads from them, and has the sequence's states.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from services.compute.backends.torch.reference import read_kv, write_kv
from services.compute.models.decoder import ForwardBatch
from services.compute.models.kernel_attention import KernelStep, PlainAttention
from services.compute.models.library_errors import first_line
from services.compute.models.recurrent_states import LayerState, SequenceStates

ATTENTION = "penstock"
# of attention: what this one does not compute
UNKNOWN_TERMS = ("position_bias", "indices", "block_indices")
OTHER_STATE = "it keeps other state than keys and values"
CACHE_NAMES = ("cache", "past_key_values")  # of forward's parameter: since transformers 5.24, and before
STATES = frozenset(("has_previous_state", "update_indexer"))  # questions of a state that no cache here has


class Unsupported(Exception):
    """The model can't run in this way; the message says why."""


class MaskRule:
    """The mask of some layers of a forward pass: the library's own function of positions, before
    any mask is made of it."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries: [n, queries], keys: [positions] int64. Returns [n, 1, queries, positions] bool.
        No token sees what comes after it."""
        return self.ask(queries, keys) & (keys <= queries[:, None, :, None])

    def ask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The same, as the library says it. Raises Unsupported if it says nothing of such positions:
        a mask may be made of the step's tokens, rather than of positions."""
        first = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=keys.device)
        try:
            return self.function(first, first, queries[:, None, :, None], keys[None, None, None, :])
        except Exception as error:  # of the library's own code
            raise Unsupported(f"its mask is not a rule of positions: {first_line(error)}") from None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values that a layer hands to the cache, for each token."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    plain_attention: PlainAttention | None = None  # None: no kernel knows its mask, or it was not looked at


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """How a layer's attention differs from the plain one."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    window: int | None = None  # that its module says; the mask decides


class Step(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, form: AttentionTerms) -> Tensor:
        """q: [T, heads, k_dim]; k, v: [T, kv_heads, k_dim or v_dim] of the step's tokens. Returns
        [T, heads, v_dim]."""
        ...


current_step: ContextVar[Step] = ContextVar("current_step")


def register() -> None:
    """Make ATTENTION known to transformers."""
    AttentionInterface.register(ATTENTION, attend_in_step)
    AttentionMaskInterface.register(ATTENTION, make_rule)


def make_rule(*, mask_function: Callable[..., Tensor], **_: object) -> MaskRule:
    """Make the rule that stands for a mask. The rest of what the library says is about one sequence
    with a cache of its own."""
    return MaskRule(mask_function)


def attend_in_step(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query, key, value: [1, heads, T, dim]. Returns [1, T,
    heads, v_dim]."""
    if unknown := [name for name in UNKNOWN_TERMS if terms.get(name) is not None]:
        raise Unsupported(f"its attention has {unknown[0]}")
    if not isinstance(attention_mask, MaskRule):
        raise Unsupported("its attention makes masks of its own")
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    form = AttentionTerms(scaling, terms.get("softcap"), terms.get("s_aux"), terms.get("sliding_window"))
    return current_step.get().attend(module.layer_idx, q, k, v, attention_mask, form)[None], None  # type: ignore[arg-type]


class PagedLayer:
    """One layer's part of the paged cache."""

    def __init__(self, kv: Tensor, head_dim: int, shape: LayerShape) -> None:
        """kv: [2, blocks, kv_heads, block_size, head_dim], or of int8 groups. A layer with fewer
        heads or smaller ones uses a part of each row."""
        self.kv = kv[:, :, : shape.num_kv_heads]
        self.head_dim = head_dim
        self.shape = shape

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """k, v: [T, kv_heads, k_dim or v_dim]; slot_mapping: [T] int64."""
        k, v = (F.pad(each, (0, self.head_dim - each.shape[-1])) for each in (k, v))
        write_kv(self.kv, k, v, slot_mapping)

    def read(self, block_tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """block_tables: [n, blocks] int64. Returns keys and values, [n, kv_heads, blocks *
        block_size, k_dim or v_dim]."""
        k, v = (
            read_kv(self.kv[which][block_tables], self.head_dim, dtype).transpose(1, 2).flatten(2, 3)
            for which in (0, 1)
        )
        return k[..., : self.shape.k_dim], v[..., : self.shape.v_dim]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences with the same number of tokens in the step, whose attention is one call."""

    rows: Tensor  # [n, queries] int64, of the step's tokens
    positions: Tensor  # [n, queries] int64, of those tokens in their sequences
    block_tables: Tensor  # [n, blocks] int64, padded with any valid block
    block_lens: Tensor | None  # [n, blocks] int64: of each block, how many of its positions are tokens; None: all

    def are_tokens(self, block_size: int) -> Tensor | bool:
        """Which positions are tokens, [n, 1, 1, blocks * block_size] bool."""
        if self.block_lens is None:
            return True
        return (torch.arange(block_size, device=self.block_lens.device) < self.block_lens[..., None]).flatten(1)[
            :, None, None
        ]


def group_sequences(batch: ForwardBatch, block_size: int, *, is_each_alone: bool) -> list[AttentionBatch]:
    """Single tokens together for each power of two of blocks, so that at most half of what a group
    reads is padding; each chunk alone, or each sequence."""
    members: dict[tuple[int, int], list[tuple[int, int]]] = {}  # row and number of each sequence
    row = 0
    for number, (length, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        kind = (0, (-(-context // block_size)).bit_length()) if length == 1 and not is_each_alone else (1, number)
        members.setdefault(kind, []).append((row, number))
        row += length
    device, groups = batch.slot_mapping.device, []
    for each in members.values():
        length = batch.query_lens[each[0][1]]
        contexts = [batch.context_lens[number] for _, number in each]
        width = -(-max(contexts) // block_size)
        tables, lens = (
            None
            if rows is None
            else torch.tensor([(*rows[number], *(0,) * width)[:width] for _, number in each], device=device)
            for rows in (batch.block_tables, batch.block_lens)
        )
        assert tables is not None
        offsets = torch.arange(length, device=device)
        groups.append(
            AttentionBatch(
                torch.tensor([first for first, _ in each], device=device)[:, None] + offsets,
                torch.tensor(contexts, device=device)[:, None] - length + offsets,
                tables,
                lens,
            )
        )
    return groups


class RaggedStep:
    """A step whose sequences stand in one row."""

    def __init__(
        self,
        slot_mapping: Tensor,
        groups: list[AttentionBatch],
        layers: dict[int, PagedLayer],
        kernels: KernelStep | None = None,
    ) -> None:
        """groups: for the layers that have no kernel."""
        self.kernels = kernels
        self.layers = layers
        self.slot_mapping = slot_mapping
        self.groups = groups
        # made once a step, shared by the layers
        self.masks: dict[tuple[MaskRule, int], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, form: AttentionTerms) -> Tensor:
        paged = self.layers[layer]
        if self.kernels is not None and layer in self.kernels.layers:
            return self.kernels.attend(layer, (q, k, v), paged.kv, form.sinks)
        paged.write(k, v, self.slot_mapping)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        for number, group in enumerate(self.groups):
            keys, values = paged.read(group.block_tables, q.dtype)
            if (rule, number) not in self.masks:
                seen = rule(group.positions, torch.arange(keys.shape[2], device=q.device))
                self.masks[rule, number] = seen & group.are_tokens(paged.kv.shape[3])
            found = masked_attention(
                q[group.rows].transpose(1, 2),
                keys,
                values,
                self.masks[rule, number],
                scale=form.scale,
                softcap=form.softcap,
                sinks=form.sinks,
            )
            out[group.rows] = found.transpose(1, 2)
        return out


class PassingCache(Cache):  # type: ignore[misc]
    """The cache of the ragged way: K and V are written when a layer attends.

    A question that has no answer here is refused, in any release of the library: a wrong answer
    would be wrong tokens.
    """

    is_sliding = is_linear = is_dummy = ()  # every layer holds all tokens
    is_compileable = False

    def __init__(self, length: int = 0, states: SequenceStates | None = None) -> None:
        """length: how many tokens are said to be in it; states: of the one sequence that it is of, which the
        pass brings up to date; None: of a cache that has none."""
        self.length = length
        self.states = states
        self.shapes: dict[int, LayerShape] = {}  # of the layers that have handed over K and V
        self.num_new = 0  # tokens that these handed over

    def __getattribute__(self, name: str) -> Any:
        is_ours = name in object.__getattribute__(self, "__dict__") or name in ANSWERS
        if is_ours or name.startswith("__"):
            return object.__getattribute__(self, name)
        raise Unsupported(OTHER_STATE if name in STATES else f"it asks its cache for {name}")

    def __len__(self) -> int:
        raise Unsupported("it asks its cache for the number of its layers")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, kv_heads, tokens, dim]. Returns them."""
        self.note(key_states, value_states, layer_idx)
        return key_states, value_states

    def note(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.num_new = key_states.shape[2]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Includes the tokens of this pass once the layer has handed them over."""
        return self.length + (self.num_new if layer_idx in self.shapes else 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self.length + query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(layer_idx, state_idx).inputs

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        return self.state(layer_idx, state_idx).add_inputs(conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state(layer_idx, state_idx).recurrent

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.state(layer_idx, state_idx).set_recurrent(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """States are never taken back."""
        return False

    def state(self, layer_idx: int, state_idx: int) -> LayerState:
        if self.states is None:
            raise Unsupported(OTHER_STATE)
        return self.states.layers.setdefault((layer_idx, state_idx), LayerState())


class SequenceCache(PassingCache):
    """The cache of the one-by-one way: the blocks of one sequence, which holds `length` tokens
    before the pass."""

    def __init__(
        self,
        layers: dict[int, PagedLayer],
        block_table: Tensor,
        slot_mapping: Tensor,
        length: int,
        states: SequenceStates | None = None,
    ) -> None:
        """block_table: [blocks] int64; slot_mapping: [tokens] int64 of the pass's tokens."""
        super().__init__(length, states)
        self.paged = layers
        self.block_table = block_table
        self.slot_mapping = slot_mapping

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """The same. Returns those of all tokens so far."""
        self.note(key_states, value_states, layer_idx)
        paged, context = self.paged[layer_idx], self.length + len(self.slot_mapping)
        paged.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.slot_mapping)
        keys, values = paged.read(self.block_table[None], key_states.dtype)
        return keys[:, :, :context], values[:, :, :context]


# what a model may ask of these caches
ANSWERS = frozenset((*vars(PassingCache), *vars(SequenceCache)))


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T * scale)) v over the positions that the mask lets each query see.

    q: [n, heads, queries, k_dim]; k: [n, kv_heads, positions, k_dim]; v: [n, kv_heads, positions,
    v_dim]; mask: [n, 1, queries, positions] bool, True where seen; scale: 1 / sqrt(k_dim) by
    default; softcap: scores become softcap * tanh(score / softcap) (Gemma 2, section 2); sinks:
    [heads], one more score in each softmax, without a value (Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", 2023). Returns [n, heads, queries, v_dim] in q's dtype.
    The query heads that share a KV head are its queries, so K and V are read once.
    """
    n, num_heads, num_queries, k_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.reshape(n, num_kv_heads, group * num_queries, k_dim)
    seen = mask.repeat(1, 1, group, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=scale)
    else:
        scores = grouped.float() @ k.float().transpose(2, 3) * (k_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, num_kv_heads, group, 1).repeat_interleave(num_queries, 2)
            scores = torch.cat([scores, sink.expand(n, -1, -1, -1)], dim=-1)
        out = (scores.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)
    return out.reshape(n, num_heads, num_queries, v.shape[-1])


def run_modules(
    model: Any,
    parameters: Collection[str],
    inputs: dict[str, Any],
    positions: Tensor,
    length: int | None,
    rows: Tensor,
    cache: PassingCache,
) -> Tensor:
    """A pass over one row of tokens. parameters: of the model's forward; inputs: the tokens; positions:
    [tokens]; length: of the sequence after the pass; None: no mask is made of it. Returns the logits of
    some rows, [R, vocab] float32."""
    wanted: dict[str, Any] = {
        "position_ids": positions[None],
        "attention_mask": None if length is None else torch.ones((1, length), dtype=torch.int64, device=rows.device),
        "logits_to_keep": rows,
    }
    terms = {name: value for name, value in wanted.items() if name in parameters}
    logits: Tensor = model(**inputs, use_cache=True, **{cache_name(parameters): cache}, **terms).logits[0]
    return (logits if "logits_to_keep" in parameters else logits[rows]).float()


def cache_name(parameters: Collection[str]) -> str:
    """The parameter of a model's forward that takes the KV cache. Raises Unsupported without one."""
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise Unsupported("it has no KV cache")
