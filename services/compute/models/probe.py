"""Passes over a few tokens at start that find out whether a model of the library can run in a way, and what the
cache needs to know of it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.compute.models.kernel_attention import PlainAttention
from services.compute.models.library_errors import first_line
from services.compute.models.recurrent_states import KINDS, SequenceStates
from services.compute.models.transformers_attention import (
    OTHER_STATE,
    AttentionTerms,
    LayerShape,
    MaskRule,
    PagedLayer,
    PassingCache,
    SequenceCache,
    Unsupported,
    current_step,
    run_modules,
)
from shared.process.host_memory import is_out_of_memory

ONE, OTHER = 5, 6  # token ids that no tokenizer uses for padding, whose embedding may be zero
FAR = 1 << 20  # a number of tokens that no step of a probe holds
# positions that a mask's rule is asked for: in a block, in a window, in a chunk, and beyond each
ASKED = (0, 1, 2, 15, 16, 23, 24, 63, 64, 511, 512, 1023, 4095, 4096, 8192, 131_072, FAR)
KEPT_ELSEWHERE = "its layers keep keys and values elsewhere"
ROUNDING = 1e-3  # of the largest number: more than the order of a sum changes, less than a token or a position does


@dataclass(frozen=True, slots=True)
class Probed:
    """The findings of a probe."""

    shapes: dict[int, LayerShape]  # of the layers that have K and V, by the library's numbers for them
    vocab_size: int
    state_bytes: int = 0  # of a sequence, in addition to its K and V
    continues_chunks: bool = True  # whether several tokens may follow a state at once


@dataclass(frozen=True, slots=True)
class Handed:
    """A layer's part of a probe: all that it hands to attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor  # of ASKED
    plain_attention: PlainAttention | None


class Probe:
    """A step whose tokens attend to nothing but themselves: it finds out what the layers hand over."""

    def __init__(self) -> None:
        self.handed: dict[int, Handed] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, form: AttentionTerms) -> Tensor:
        if layer in self.handed:
            raise Unsupported(f"its layer {layer} attends more than once")
        asked = torch.tensor(ASKED, device=q.device)
        mask = rule.ask(asked[None], asked)
        if bool((mask & (asked > asked[:, None])).any()):
            raise Unsupported("its attention is not causal")
        plain_attention = find_plain_attention(q, rule, form) if q.dtype == k.dtype == v.dtype else None
        self.handed[layer] = Handed(q, k, v, mask, plain_attention)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def find_plain_attention(q: Tensor, rule: MaskRule, form: AttentionTerms) -> PlainAttention | None:
    """The same for a kernel; None: the rule is neither that of all tokens before, nor of the last ones."""
    for window in (form.window, None):
        near = () if window is None else (window - 1, window, window + 1)
        places = torch.tensor(sorted({*ASKED, *near, *(FAR - each for each in near)}), device=q.device)
        queries = places[:, None]
        expected = places <= queries if window is None else (places <= queries) & (places > queries - window)
        if torch.equal(rule.ask(places[None], places).expand(1, 1, *expected.shape)[0, 0], expected):
            scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
            return PlainAttention(q.dtype, q.shape[1], window, scale, form.softcap or 0.0)
    return None


def probe_row(model: Any, parameters: Collection[str]) -> Probed:
    """Run a row of three sequences of a token each, to learn which layers have K and V, of what shape,
    and how many logits there are. Raises Unsupported if the model can't run so.

    What a layer computes of a token must follow from the token and its position alone: the first and
    the last are the same, and a cache that says it holds more must change nothing.
    """
    if "position_ids" not in parameters:
        raise Unsupported("it takes no position_ids")
    near, far = PassingCache(), PassingCache(FAR)
    (logits, handed), (others, handed_far) = (
        run_probe(model, parameters, (ONE, OTHER, ONE), (0, 1, 0), cache) for cache in (near, far)
    )
    if not handed or handed.keys() != near.shapes.keys():
        raise Unsupported(KEPT_ELSEWHERE)
    pairs = [(logits, others), (logits[:1], logits[2:])]
    for layer, each in handed.items():
        other = handed_far[layer]
        pairs += [(each.q, other.q), (each.k, other.k), (each.v, other.v), (each.mask, other.mask)]
        pairs += [(tensor[:1], tensor[2:]) for tensor in (each.q, each.k, each.v)]
    if not all(is_near(one, other, model.dtype) for one, other in pairs):
        raise Unsupported("what it computes of a token depends on its place in the row, or on the length of its cache")
    shapes = {
        layer: LayerShape(each.k.shape[1], each.k.shape[-1], each.v.shape[-1], each.plain_attention)
        for layer, each in handed.items()
    }
    return Probed(shapes, logits.shape[-1])


def probe_alone(model: Any, parameters: Collection[str]) -> Probed:
    """The same of one sequence's tokens. Raises Unsupported where the second token changes the first's
    logits; where another sequence in between changes the next's: a state that no cache holds; and where what
    continues a sequence, token by token, has other logits than in the whole."""

    def run(token_ids: tuple[int, ...], cache: PassingCache) -> Tensor:
        places = range(cache.length, cache.length + len(token_ids))
        return run_probe(model, parameters, token_ids, tuple(places), cache, places.stop if has_kv else None)[0]

    has_kv, cache = True, PassingCache(states=SequenceStates())
    logits = run((ONE, ONE), cache)
    has_kv = bool(cache.shapes)
    assert cache.states is not None
    if not cache.shapes and not cache.states.layers:
        raise Unsupported(KEPT_ELSEWHERE)
    if not is_near(logits[0], run((ONE, OTHER), PassingCache(states=SequenceStates()))[0], model.dtype):
        raise Unsupported("its attention is not causal")
    # both halves are longer than a convolution's kernel
    half = 1 + max((each.shape[-1] for each in cache.states.tensors("inputs")), default=1)
    text = ((ONE, OTHER, OTHER) * half)[: 2 * half]
    whole, alone = (run(each, PassingCache(states=SequenceStates())) for each in (text, text[half:]))
    layers = {
        number: PagedLayer(empty_block(shape, 2 * half, model), max(shape.k_dim, shape.v_dim), shape)
        for number, shape in cache.shapes.items()
    }

    def run_at(first: int, end: int, states: SequenceStates) -> Tensor:
        slots = torch.arange(first, end, device=model.device)
        return run(text[first:end], SequenceCache(layers, torch.zeros_like(slots[:1]), slots, first, states))

    def go_on(size: int, without: str = "") -> Tensor:
        """The second half's logits, so many tokens at once; without: one of the KINDS, which is forgotten."""
        states = of_first.copy(without=without)
        return torch.cat([run_at(first, first + size, states) for first in range(half, 2 * half, size)])

    of_first = SequenceStates()
    run_at(0, half, of_first)
    is_continued = []  # token by token, and at once
    for size in (1, half):
        logits = go_on(size)
        run((OTHER, ONE), PassingCache(states=SequenceStates()))
        again = go_on(size)
        if not is_near(logits, again, model.dtype):
            raise Unsupported(OTHER_STATE)
        # the same sums in the same order: what differs no more than two equal runs has not read the state
        noise = torch.dist(logits, again)
        is_read = all(torch.dist(logits, go_on(size, kind)) > noise for kind in KINDS if of_first.tensors(kind))
        is_continued.append(is_read and is_of_whole(logits, whole[half:], alone, model.dtype))
    if not is_continued[0]:
        raise Unsupported("it forgets a sequence from one token to the next")
    return Probed(cache.shapes, logits.shape[-1], cache.states.num_bytes, is_continued[1])


def is_of_whole(logits: Tensor, whole: Tensor, alone: Tensor, dtype: torch.dtype) -> bool:
    """Whether tokens have these logits as a part of the whole, and not alone. Rounded to fewer bits than float32's,
    a mixture may choose other experts in a pass over other tokens: their logits are nearer then, not near."""
    is_nearer = bool(torch.dist(logits, whole) < torch.dist(alone, whole) / 2)
    return is_near(logits, whole, dtype) or (is_nearer and dtype != torch.float32)


def empty_block(shape: LayerShape, num_tokens: int, model: Any) -> Tensor:
    """A layer's cache of one block."""
    return torch.zeros(
        (2, 1, shape.num_kv_heads, num_tokens, max(shape.k_dim, shape.v_dim)), dtype=model.dtype, device=model.device
    )


def is_near(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results are equal but for rounding, which the number of rows of a product changes."""
    one, other = one.float(), other.float()
    return torch.allclose(one, other, rtol=0.0, atol=max(ROUNDING, 4 * torch.finfo(dtype).eps) * float(one.abs().max()))


def run_probe(
    model: Any,
    parameters: Collection[str],
    token_ids: tuple[int, ...],
    positions: tuple[int, ...],
    cache: PassingCache,
    length: int | None = None,
) -> tuple[Tensor, dict[int, Handed]]:
    """The logits of these tokens, and what each layer handed to attention; length: as of run_modules.
    Raises Unsupported."""
    step = Probe()
    token = current_step.set(step)
    ids, places, rows = (
        torch.tensor(each, device=model.device) for each in (token_ids, positions, range(len(token_ids)))
    )
    try:
        with torch.inference_mode():
            logits = run_modules(model, parameters, {"input_ids": ids[None]}, places, length, rows, cache)
    except Unsupported:
        raise
    except Exception as error:  # what a model asks for besides keys and values is its own affair
        if is_out_of_memory(error):
            raise
        raise Unsupported(f"it needs more than a cache of keys and values: {first_line(error)}") from None
    finally:
        current_step.reset(token)
    # one token's own logits don't follow from its query and key
    numbers = [logits, *(tensor for each in step.handed.values() for tensor in (each.q, each.k, each.v))]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        raise Unsupported("its logits are not finite")
    return logits, step.handed
