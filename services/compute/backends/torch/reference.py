"""The operations of a layer in plain torch: their definition, and what runs where no faster kernel
is built.

T: tokens of the step (all sequences, ragged); S: slots of the cache. Shapes and dtypes are part of
the contract.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.backends.matrix import (
    MAX_STEPS,
    SLICE,
    Dense,
    Float8,
    Grouped,
    Int4Columns,
    Int8Columns,
    Joined,
    Matrix,
    concatenate,
)

# rows of a product: with a multiple of it, a row's bits do not depend on how many there are (below,
# the libraries take other instructions for a few rows, and for the last ones)
ROW_TILE = 16
RANGE = 256  # positions whose keys are taken at a time
LOWEST = -1.0e38  # initial value of a running maximum


def pad_rows(x: Tensor) -> Tensor:
    """x: [..., T, k]. Returns it with zeros for more rows, up to a multiple of ROW_TILE."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % ROW_TILE))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [T, in]; weight: [out, in]; bias: [out]. Returns [T, out]; a row's bits are the same in any
    company."""
    return F.linear(pad_rows(x), weight, bias)[: len(x)]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 by each row's largest magnitude. x: [..., k]. Returns [..., k] int8, and [...]
    float32 scales: x is about int8 * scale."""
    largest = x.float().abs().amax(-1)
    # not 127.0 / largest: torch rounds that twice
    factor = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return (x.float() * factor[..., None]).round().to(torch.int8), largest / 127.0


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize each group of a row's inputs by itself; the last may be a part of one. x: [T, k].
    Returns [T, k] int8, and [T, ceil(k / group)] float32 scales."""
    codes, scales = quantize_rows(F.pad(x, (0, -x.shape[-1] % group)).view(len(x), -1, group))
    return codes.flatten(1)[:, : x.shape[-1]], scales


# of e4m3: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1
FLOAT8_LARGEST = 448.0


def quantize_float8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 by the largest magnitude of each row's groups of inputs. x: [T, k]. Returns
    [T, k] float8_e4m3fn, and [T, ceil(k / group)] float32 scales."""
    groups = F.pad(x, (0, -x.shape[-1] % group)).view(len(x), -1, group).float()
    largest = groups.abs().amax(-1)
    factor = torch.where(largest > 0, torch.full_like(largest, FLOAT8_LARGEST) / largest, 0.0).clamp(
        max=torch.finfo(torch.float32).max
    )
    codes = (groups * factor[..., None]).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[-1]], largest / FLOAT8_LARGEST


def quantize_weight(weight: Tensor, quantization: str, group: int) -> Int8Columns | Int4Columns | Grouped | Float8:
    """`w8a8`: int8 by column; `fp8`: e4m3 by column; `w4`: quantize_int4; `nf4`: quantize_nf4. weight:
    [n, k]. Some rows at a time: in float32 the whole would take several times its own memory."""
    k = weight.shape[1]

    def quantize(part: Tensor) -> Matrix:
        if quantization == "w8a8":
            return Int8Columns(*quantize_rows(part))
        if quantization == "fp8":
            return Float8(*quantize_float8(part, k), k)
        return quantize_int4(part, group) if quantization == "w4" else quantize_nf4(part, group)

    whole = concatenate([quantize(part) for part in torch.split(weight, max(1, SLICE // k))], weight.dtype)
    assert not isinstance(whole, Dense | Joined)
    return whole


# The 16 values of NF4, which split a normal distribution evenly: Dettmers et al., "QLoRA" (2023),
# appendix E.
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
NF4_TABLE = tuple(round(127 * value) for value in NF4)


def quantize_nf4(weight: Tensor, group: int) -> Grouped:
    """NF4's values, rounded to int8, times each group's largest magnitude. weight: [n, k]."""
    n, k = weight.shape
    groups = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    table = torch.tensor(NF4_TABLE, dtype=torch.int8, device=weight.device)
    scales = (groups.abs().amax(-1) / 127.0).clamp(min=1e-7).half()
    middles = (table[1:].float() + table[:-1].float()) / 2
    codes = torch.bucketize(groups / scales.float()[..., None], middles)
    return Grouped(codes.to(torch.uint8).view(n, -1)[:, :k], scales, group, table)


MIN_STEP = 1e-30  # no group of w4 has a smaller one; float32 holds it
# of a column's smallest scale: larger ones may bring the groups' steps nearer to whole numbers
SCALE_FACTORS = tuple(1.0 + number / 40 for number in range(9))


def quantize_int4(weight: Tensor, group: int) -> Int4Columns:
    """Sixteen even steps over about each group's range, 0 among them, each a whole multiple of the
    column's scale. The step, and the zero, with the least sum of the errors' third powers: squares
    would clip the largest weights, which matter most. weight: [n, k]."""
    n, k = weight.shape
    groups = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    even = ((high - low) / 15.0).clamp(min=MIN_STEP)
    scales = choose_scales(even, torch.maximum(-low, high))[:, None]
    smallest, zeros, steps = even.new_full(even.shape, torch.inf), torch.zeros_like(even), torch.ones_like(even)
    for more in (-1, 0, 1):
        some = ((even / scales).floor() + more).clamp(1, MAX_STEPS)
        unit = some * scales
        for each in ((-low / unit).round().clamp(0, 15), (15 - (high / unit).round()).clamp(0, 15)):
            errors = (
                round_int4(groups, some, each, scales).sub_(each[..., None]).mul_(unit[..., None]).sub_(groups).abs_()
            )
            losses = errors.pow_(3).sum(-1)
            is_less = losses < smallest
            smallest, zeros, steps = (
                torch.where(is_less, a, b) for a, b in ((losses, smallest), (each, zeros), (some, steps))
            )
    codes = round_int4(groups, steps, zeros, scales)
    return Int4Columns(
        codes.to(torch.uint8).view(n, -1)[:, :k], scales[:, 0], zeros.to(torch.int8), steps.to(torch.int8), group
    )


def choose_scales(even: Tensor, reach: Tensor) -> Tensor:
    """Scales [n] of columns over which their groups' even steps are most nearly whole, none more than
    MAX_STEPS, and with which int8 reaches the largest magnitudes. even, reach: [n, groups]."""
    smallest = torch.maximum(reach / 127.0, even / MAX_STEPS).amax(-1, keepdim=True)
    factors = torch.tensor(SCALE_FACTORS, device=even.device)
    scales = (smallest * factors)[..., None]  # [n, factors, 1]
    errors = ((even[:, None] / scales).round().clamp(1, MAX_STEPS) * scales - even[:, None]).square().sum(-1)
    return smallest[:, 0] * factors[errors.argmin(-1)]


def round_int4(weights: Tensor, steps: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The codes, as floats, of weights [..., group] whose products with steps are int8. steps, zeros:
    [...], zeros from 0 on."""
    widest = (127.0 / steps).floor()
    lowest, highest = zeros - torch.minimum(zeros, widest), zeros + torch.minimum(15.0 - zeros, widest)
    return (
        (weights / (steps * scales)[..., None])
        .add_(zeros[..., None])
        .round_()
        .clamp_(lowest[..., None], highest[..., None])
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32 (Zhang and Sennrich 2019), times the
    weight if there is one. x: [..., hidden]."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def norm_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm of each head with a weight of [head_dim], or of all heads together with one of
    [heads * head_dim]; None: x as it is. x: [T, heads, head_dim]."""
    if weight is None:
        return x
    return rms_norm(x, weight, eps) if len(weight) == x.shape[-1] else rms_norm(x.flatten(1), weight, eps).view_as(x)


ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of clamped_swiglu


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """The MLP between its products, with one of ACTIVATIONS: silu(gate) * up, gelu_tanh(gate) * up,
    or gpt-oss' clamped_swiglu. gate_up: [T, 2 * intermediate], gate first. Returns [T,
    intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        return clamped_swiglu(gate.float(), up.float()).to(gate.dtype)
    return (silu(gate.float()) if activation == "silu" else gelu_tanh(gate.float())).to(gate.dtype) * up


# torch's own take other instructions for the last few of many numbers than for the others
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), of float32."""
    return x / (1.0 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """x times the normal distribution's mass up to x, nearly (Hendrycks and Gimpel 2016, "Gaussian
    Error Linear Units", section 2), of float32."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate), of float32, with the gate at most SWIGLU_LIMIT
    and up within it (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2)."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate / (1.0 + torch.exp(-SWIGLU_ALPHA * gate)) * (up + 1.0)


def add_scaled(x: Tensor, h: Tensor, norm: Tensor | None, eps: float, multiplier: float) -> Tensor:
    """x + multiplier * h. If there is a norm [hidden], h is normalized first. x, h: [T,
    hidden]. Returns [T, hidden]."""
    h = h if norm is None else rms_norm(h, norm, eps)
    return x + h * multiplier


def cap_scores(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): as x where it is small, never beyond cap (Gemma Team 2024, "Gemma 2",
    section 2). A cap of 0 is none."""
    return torch.tanh(x / cap) * cap if cap else x


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + rotary_dim / 2); dimensions from rotary_dim on stay as they are.

    x: [T, heads, head_dim]; cos, sin: [T, 1, rotary_dim / 2] float32. Computed in float32.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat(((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest), dim=-1)


def kv_row_size(head_dim: int, group: int) -> int:
    """Bytes of a head's key, or value, of one token in a cache of int8 groups: the values, then a
    float16 scale for each group."""
    return head_dim + 2 * (head_dim // group)


def kv_group(kv: Tensor, head_dim: int) -> int:
    """How many dimensions share a scale in this cache; 0: it is not quantized."""
    return 2 * head_dim // (kv.shape[-1] - head_dim) if kv.dtype == torch.uint8 else 0


def write_kv(kv: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Scatter new keys and values, [T, kv_heads, head_dim], into a layer's cache.

    kv: [2, blocks, kv_heads, block_size, head_dim], or [..., kv_row_size] uint8 of int8 groups,
    symmetric by each group's largest magnitude.
    """
    blocks, offsets = slot_mapping // kv.shape[3], slot_mapping % kv.shape[3]
    for which, x in enumerate((k, v)):
        if group := kv_group(kv, x.shape[-1]):
            groups = x.float().view(*x.shape[:-1], -1, group)
            scales = (groups.abs().amax(-1) / 127.0).clamp(min=1e-7).half()
            values = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(-2)
            x = torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=-1)
        kv[which][blocks, :, offsets] = x


def read_kv(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a cache, [..., head_dim] or [..., kv_row_size], as [..., head_dim] in dtype."""
    if not (group := kv_group(rows, head_dim)):
        return rows
    values = rows[..., :head_dim].contiguous().view(torch.int8).float()
    scales = rows[..., head_dim:].contiguous().view(torch.float16).float()
    return (values * scales.repeat_interleave(group, -1)).to(dtype)


@dataclass(frozen=True, slots=True)
class Scores:
    """The changes to q . k before the softmax."""

    scale: float  # multiplies it
    cap: float = 0.0  # it becomes cap * tanh(it / cap); 0: no cap

    @classmethod
    def of(cls, head_dim: int) -> "Scores":
        """1 / sqrt(head_dim) and no cap: Vaswani et al., "Attention Is All You Need" (2017),
        section 3.2.1."""
        return cls(1.0 / math.sqrt(head_dim))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    block_lens: Tensor,
    positions: tuple[Tensor, Tensor],
    window: int | None,
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap * tanh(scale * q . k / cap)) v over the paged cache, in float32, for some tokens
    of each of n sequences.

    q: [n, tokens, heads, head_dim]; kv: as in write_kv; block_tables: [n, blocks] int64, padded
    with any valid block; block_lens: [n, blocks] int64: of each block, how many of its positions
    are read; positions: of the queries, and the last that each sees, [n, tokens] int64; window: how
    many tokens back each sees, itself included; sinks: [heads] float32, one more score in each
    softmax, without a value (Xiao et al., "Efficient Streaming Language Models with Attention
    Sinks", 2023). Returns q's shape.

    Keys are taken a range at a time, from position 0 on, with a running maximum, sum and output for
    each query (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), and the
    query heads that share a KV head are rows of one product. A range that a query does not see
    leaves it as it was, and a product's rows do not depend on their number (pad_rows). So a token's
    result is the same bits alone, with others, and in any chunk.
    """
    n, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group = num_heads // num_kv_heads
    num_rows = num_tokens * group
    rows = pad_rows(
        q.view(n, num_tokens, num_kv_heads, group, head_dim)
        .transpose(1, 2)
        .reshape(n, num_kv_heads, num_rows, head_dim)
        .float()
    )
    own, ends = (
        F.pad(position.repeat_interleave(group, 1), (0, rows.shape[2] - num_rows))[:, None, :, None]
        for position in positions
    )
    highest = torch.full((*rows.shape[:3], 1), LOWEST, device=q.device)
    total = torch.zeros_like(highest)
    out = torch.zeros_like(rows)
    first = 0 if window is None else max(0, int(positions[0].min()) + 1 - window) // RANGE * RANGE
    for start in range(first, int(ends.max()) + 1, RANGE):
        keys = torch.arange(start, start + RANGE, device=q.device)
        places = (keys // block_size).clamp(max=block_tables.shape[1] - 1)
        blocks = block_tables[:, places]
        is_there = (keys % block_size < block_lens[:, places]) & (keys // block_size == places)
        # [n, kv_heads, RANGE, head_dim]
        k, v = (
            read_kv(kv[which][blocks, :, keys % block_size], head_dim, torch.float32).float().transpose(1, 2)
            for which in (0, 1)
        )
        is_seen = is_there[:, None, None] & (keys <= ends)
        if window is not None:
            is_seen &= keys > own - window
        changed = cap_scores((rows @ k.transpose(2, 3)) * scores.scale, scores.cap).masked_fill(~is_seen, -torch.inf)
        before, highest = highest, torch.maximum(highest, changed.amax(-1, keepdim=True))
        weights, factor = torch.exp(changed - highest), torch.exp(before - highest)
        total = total * factor + weights.sum(-1, keepdim=True)
        out = out * factor + weights @ v.masked_fill(~is_there[:, None, :, None], 0.0)
    if sinks is not None:
        sink = F.pad(
            sinks.view(num_kv_heads, 1, group).expand(-1, num_tokens, -1).flatten(1), (0, rows.shape[2] - num_rows)
        )[None, :, :, None]
        top = torch.maximum(highest, sink)
        shrink = torch.exp(highest - top)
        out, total = out * shrink, total * shrink + torch.exp(sink - top)
    found = (out / total)[:, :, :num_rows].to(q.dtype)
    return found.view(n, num_kv_heads, num_tokens, group, head_dim).transpose(1, 2).reshape(q.shape)
