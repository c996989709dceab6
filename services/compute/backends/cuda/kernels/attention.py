"""Attention over the paged cache: rotation and the way into the cache, then one algorithm for
single tokens and for chunks.

Keys are walked over in blocks from position 0, in ranges of positions, whose results are merged in
order. The ranges of a short row (a single token, perhaps with drafts) are divided among programs
and merged by another kernel; a chunk's are merged in registers, by the same arithmetic. A block
that a query does not see changes nothing of its own, so it does not matter in which chunks a prompt
came, or which other sequences are in the step.

The first EQUAL ranges have RANGE positions. The next DOUBLING have twice as many, those behind them
four times, and so on: a long context has few results to keep.

A layer's cache is [2, blocks, kv_heads * block_size * row] of keys and values: of each block
[kv_heads, block_size, head_dim] numbers, and, where they are int8, [kv_heads, block_size, head_dim
/ group] float16 scales after them.

What differs from step to step is not specialized on: no step has a kernel of its own to be
compiled while others wait.
"""

import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.common import dot, largest_magnitude, nearest, rounded, tanh, widened

EQUAL = tl.constexpr(16)
DOUBLING = tl.constexpr(8)
DOUBLINGS = tl.constexpr(18)  # of RANGE: more positions than int32 counts


@triton.jit
def range_of(position, RANGE: tl.constexpr):
    """The range that a position is in."""
    doublings = 0
    for number in tl.static_range(DOUBLINGS):
        doublings += (position >= (EQUAL * RANGE << number)).to(tl.int32)
    size = RANGE << doublings
    first = tl.where(doublings > 0, EQUAL // 2 * size, 0)
    return tl.where(doublings > 0, EQUAL + (doublings - 1) * DOUBLING, 0) + (position - first) // size


@triton.jit
def range_start(number, RANGE: tl.constexpr):
    """The first position of a range."""
    doublings = tl.where(number < EQUAL, 0, (number - EQUAL) // DOUBLING + 1)
    size = RANGE << doublings
    beyond = EQUAL // 2 * size + (number - EQUAL) % DOUBLING * size
    return tl.where(number < EQUAL, number * RANGE, beyond)


@triton.jit
def normed_and_weighted(x, weight, inverse_norm):
    """RMSNorm, rounded as reference.rms_norm rounds. x, weight: [HEADS, DIM] in their dtype;
    inverse_norm: [HEADS]. Returns float32."""
    return widened(rounded(widened(rounded(widened(x) * inverse_norm[:, None], x.dtype)) * widened(weight), x.dtype))


@triton.jit
def norm_weights(q_norm_ptr, k_norm_ptr, at, is_query, HEAD_DIM: tl.constexpr):
    """The weights of each head's norm at these dimensions, [HEADS, DIM]."""
    is_in = at < HEAD_DIM
    return tl.where(
        is_query, tl.load(q_norm_ptr + at, mask=is_in)[None, :], tl.load(k_norm_ptr + at, mask=is_in)[None, :]
    )


@triton.jit
def quantized(y, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """y [HEADS, DIM] float32 as int8 codes, and a float16 scale for each of its groups, [HEADS,
    DIM // GROUP]."""
    groups = tl.reshape(y, [HEADS, DIM // GROUP, GROUP])
    scales = tl.maximum(tl.div_rn(largest_magnitude(groups, 2), 127.0), 1e-7).to(tl.float16)
    codes = nearest(tl.div_rn(groups, tl.broadcast_to(scales.to(tl.float32)[:, :, None], [HEADS, DIM // GROUP, GROUP])))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.reshape(codes, [HEADS, DIM]).to(tl.int8), scales


@triton.jit
def rotate_and_write(
    qkv_ptr,
    kv_ptr,
    kv_scales_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    num_tokens_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    kv_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORMS_AFTER_ROTATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_PROJECTIONS: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """A program a token of qkv [T, heads of q, k and v, head_dim] and HEADS of its heads: q is
    normalized and rotated in place, in either order, k too on its way into the cache, v goes there,
    perhaps normalized.

    KV_PROJECTIONS: 2; 1: there is no v, and k, as it comes, is also the values; 0: there is no k either,
    and nothing goes into the cache. Norms [head_dim] may be None. cos, sin: [T, rotary_dim / 2] float32;
    slots: [T] int64; num_tokens: [1] int32, beyond which rows are padding. GROUP: of an int8 cache; 0:
    it has qkv's dtype. kv_stride: from keys to values; block_stride: from block to block; both in the
    cache's elements.
    """
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(num_tokens_ptr):
        slot = tl.load(slots_ptr + token)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        at = tl.arange(0, DIM)
        num_heads: tl.constexpr = NUM_HEADS + (2 * NUM_KV_HEADS if KV_PROJECTIONS > 0 else 0)
        is_in = (head < num_heads)[:, None] & (at < HEAD_DIM)[None, :]
        missing: tl.constexpr = NUM_KV_HEADS if KV_PROJECTIONS == 1 else 0
        base = qkv_ptr + token * (num_heads - missing) * HEAD_DIM
        is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        source = tl.where(is_value, head[:, None] - missing, head[:, None]) * HEAD_DIM
        half: tl.constexpr = ROTARY_DIM // 2
        is_first = at < half
        partner_at = tl.where(is_first, at + half, tl.where(at < ROTARY_DIM, at - half, at))
        x = tl.load(base + source + at[None, :], mask=is_in, other=0.0)
        partner = tl.load(base + source + partner_at[None, :], mask=is_in, other=0.0)
        y, z = widened(x), widened(partner)
        is_query = (head < NUM_HEADS)[:, None]
        has_norms: tl.constexpr = q_norm_ptr is not None
        inverse_norm = tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)
        if HAS_VALUE_NORM:
            y = tl.where(is_value, widened(rounded(y * inverse_norm[:, None], x.dtype)), y)
        if has_norms and not NORMS_AFTER_ROTATION:
            weight = norm_weights(q_norm_ptr, k_norm_ptr, at, is_query, HEAD_DIM)
            partner_weight = norm_weights(q_norm_ptr, k_norm_ptr, partner_at, is_query, HEAD_DIM)
            y = tl.where(is_value, y, normed_and_weighted(x, weight, inverse_norm))
            z = normed_and_weighted(partner, partner_weight, inverse_norm)
        angle_at = token * half + tl.where(is_first, at, at - half)
        cos = tl.load(cos_ptr + angle_at, mask=at < ROTARY_DIM, other=1.0)[None, :]
        sin = tl.load(sin_ptr + angle_at, mask=at < ROTARY_DIM, other=0.0)[None, :]
        rotated = tl.where(is_first[None, :], y * cos - z * sin, y * cos + z * sin)
        y = tl.where(is_value | (at >= ROTARY_DIM)[None, :], y, widened(rounded(rotated, x.dtype)))
        if has_norms and NORMS_AFTER_ROTATION:
            inverse_norm = tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)
            weight = norm_weights(q_norm_ptr, k_norm_ptr, at, is_query, HEAD_DIM)
            y = tl.where(is_value, y, normed_and_weighted(rounded(y, x.dtype), weight, inverse_norm))
        tl.debug_barrier()  # all threads have read their partners
        tl.store(
            base + head[:, None] * HEAD_DIM + at[None, :], rounded(y, x.dtype), mask=is_in & (head < NUM_HEADS)[:, None]
        )
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        is_cached = is_in & (head >= NUM_HEADS)[:, None]
        row = kv_head * BLOCK_SIZE + slot % BLOCK_SIZE
        block = tl.where(head >= NUM_HEADS + NUM_KV_HEADS, kv_stride, 0) + slot // BLOCK_SIZE * block_stride
        kv_at = kv_ptr + (block + row * HEAD_DIM)[:, None] + at[None, :]
        if GROUP == 0:
            tl.store(kv_at, rounded(y, x.dtype), mask=is_cached)
        else:
            codes, scales = quantized(y, HEADS, DIM, GROUP)
            tl.store(kv_at, codes, mask=is_cached)
            num_groups: tl.constexpr = HEAD_DIM // GROUP
            group = tl.arange(0, DIM // GROUP)
            first = (block + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) // 2 + row * num_groups
            tl.store(
                kv_scales_ptr + first[:, None] + group[None, :],
                scales,
                mask=(head >= NUM_HEADS)[:, None] & (head < num_heads)[:, None] & (group < num_groups)[None, :],
            )


@triton.jit
def load_cache(
    kv_ptr,
    kv_scales_ptr,
    blocks_at,
    offsets,
    kv_head,
    is_there,
    dtype: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rows of the cache as [KEYS, DIM] in dtype; 0 where nothing is: what others left there may be
    no number. blocks_at: [KEYS], where their blocks begin, of keys or of values."""
    at = tl.arange(0, DIM)
    is_in = is_there[:, None] & (at < HEAD_DIM)[None, :]
    row = kv_head * BLOCK_SIZE + offsets
    values = tl.load(kv_ptr + (blocks_at + row * HEAD_DIM)[:, None] + at[None, :], mask=is_in, other=0)
    if GROUP == 0:
        return values
    else:
        first = (blocks_at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) // 2 + row * (HEAD_DIM // GROUP)
        scales = tl.load(kv_scales_ptr + first[:, None] + (at // GROUP)[None, :], mask=is_in, other=0.0)
        return rounded(values.to(tl.float32) * scales.to(tl.float32), dtype)


@triton.jit
def attend_range(
    q,
    kv_ptr,
    kv_scales_ptr,
    table_ptr,
    lens_ptr,
    positions,
    lasts,
    first,
    last,
    end,
    kv_head,
    kv_stride,
    block_stride,
    window,
    scale,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Keys of [first, last), each a multiple of KEYS; [0, end) exist. q: [ROWS, DIM]; table, lens: of
    the sequence, see `attend`; positions: [ROWS]; lasts: [ROWS], the last that each sees; window:
    how many each sees before itself, and itself. Returns each row's largest score, sum of weights,
    and weighted sum of values: [ROWS], [ROWS], [ROWS, DIM] float32."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_there = keys < end
        blocks_at = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64) * block_stride
        offsets = keys % BLOCK_SIZE
        if lens_ptr is not None:
            is_there = is_there & (offsets < tl.load(lens_ptr + keys // BLOCK_SIZE, mask=is_there, other=0))
        k = load_cache(
            kv_ptr,
            kv_scales_ptr,
            blocks_at,
            offsets,
            kv_head,
            is_there,
            q.dtype,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            GROUP,
            DIM,
        )
        scores = dot(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32)) * scale
        if HAS_CAP:
            scores = tanh(scores / cap) * cap
        is_seen = is_there[None, :] & (keys[None, :] <= lasts[:, None]) & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        mass = mass * shrink + tl.sum(weights, 1)
        blocks_at += kv_stride
        v = load_cache(
            kv_ptr,
            kv_scales_ptr,
            blocks_at,
            offsets,
            kv_head,
            is_there,
            q.dtype,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            GROUP,
            DIM,
        )
        total = dot(rounded(weights, q.dtype), v, total * shrink[:, None])
        largest = new_largest
    return largest, mass, total


@triton.jit
def merge(largest, mass, total, other_largest, other_mass, other_total):
    """Merge two ranges' results. Either may be empty: -inf, 0 and 0."""
    new_largest = tl.maximum(largest, other_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink, other_shrink = tl.exp(largest - base), tl.exp(other_largest - base)
    mass = mass * shrink + other_mass * other_shrink
    return new_largest, mass, total * shrink[:, None] + other_total * other_shrink[:, None]


@triton.jit
def finished(largest, mass, total, sinks_ptr, head, is_row):
    """The sum of the values that rows attend to, with their head's sink as one more score, if there are
    any."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
        top = tl.maximum(largest, sink)
        shrink = tl.exp(largest - top)
        mass = mass * shrink + tl.exp(sink - top)
        total = total * shrink[:, None]
    return total / tl.where(mass == 0.0, 1.0, mass)[:, None]


@triton.jit(
    do_not_specialize=["num_tiles", "table_width", "max_ranges"],
    do_not_specialize_on_alignment=["tiles_ptr", "contexts_ptr", "tables_ptr", "lens_ptr", "last_seen_ptr"],
)
def attend(
    qkv_ptr,
    kv_ptr,
    kv_scales_ptr,
    tiles_ptr,
    contexts_ptr,
    tables_ptr,
    lens_ptr,
    last_seen_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    num_tiles,
    table_width,
    max_ranges,
    kv_stride,
    block_stride,
    window,
    scale,
    cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PROJECTED: tl.constexpr,
    SHARING: tl.constexpr,
    NUM_BEFORE: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    RANGE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """A program a tile of one sequence's queries, a KV head, and, if IS_SPLIT, some of its ranges.

    tiles: [4, num_tiles]: first token in the step, number of queries (0: padding), sequence, the
    first query's part; contexts: [sequences, 4]: how many tokens each has after the step, its first
    token in the step less its position, its row in the tables, and its first token's position;
    tables: [rows, table_width]; lens: the same, of each block how many of its positions are tokens,
    or None: all; last_seen: [T], the last position that each token sees, or None: its own; all
    int32. sinks: [heads] float32, or None. PROJECTED: heads of a row of qkv. SHARING query heads read
    each KV head; the first NUM_BEFORE of those of the first are elsewhere, and so may be some of the
    last one's. A tile's rows are its queries times the PLACES (SHARING up to a power of two) of a KV
    head's query heads. Writes out [T, heads * head_dim], or by query and range parts [parts, heads,
    max_ranges, head_dim] and stats [parts, heads, max_ranges, 2] of largest score and mass, float32.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_queries = tl.load(tiles_ptr + num_tiles + tile)
    if num_queries > 0:
        first_token = tl.load(tiles_ptr + tile)
        sequence = tl.load(tiles_ptr + 2 * num_tiles + tile)
        end = tl.load(contexts_ptr + 4 * sequence)
        origin = tl.load(contexts_ptr + 4 * sequence + 1)
        table_at = tl.load(contexts_ptr + 4 * sequence + 2).to(tl.int64) * table_width
        row = tl.arange(0, ROWS)
        query, of_group = row // PLACES, row % PLACES
        head = kv_head * SHARING - NUM_BEFORE + of_group
        is_row = (query < num_queries) & (of_group < SHARING) & (head >= 0) & (head < NUM_HEADS)
        token = first_token.to(tl.int64) + query
        positions = tl.where(is_row, first_token - origin + query, -1)
        lasts = positions
        if last_seen_ptr is not None:
            lasts = tl.load(last_seen_ptr + token, mask=is_row, other=-1)
        at = tl.arange(0, DIM)
        is_in = is_row[:, None] & (at < HEAD_DIM)[None, :]
        width: tl.constexpr = PROJECTED * HEAD_DIM
        q = tl.load(qkv_ptr + (token * width + head * HEAD_DIM)[:, None] + at[None, :], mask=is_in, other=0.0)
        # by the tile's first query; the last sees up to:
        first_seen = tl.maximum(first_token - origin - window + 1, 0)
        last_seen = first_token - origin + num_queries
        if last_seen_ptr is not None:
            last_seen = tl.load(last_seen_ptr + first_token + num_queries - 1) + 1
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, DIM], tl.float32)
        for number in range(
            range_of(first_seen, RANGE) + tl.program_id(2), range_of(last_seen - 1, RANGE) + 1, tl.num_programs(2)
        ):
            first = tl.maximum(range_start(number, RANGE), first_seen // KEYS * KEYS)
            last = tl.minimum(range_start(number + 1, RANGE), last_seen)
            lens = lens_ptr + table_at if lens_ptr is not None else None
            range_largest, range_mass, range_total = attend_range(
                q,
                kv_ptr,
                kv_scales_ptr,
                tables_ptr + table_at,
                lens,
                positions,
                lasts,
                first,
                last,
                end,
                kv_head,
                kv_stride,
                block_stride,
                window,
                scale,
                cap,
                NUM_KV_HEADS,
                HEAD_DIM,
                BLOCK_SIZE,
                GROUP,
                ROWS,
                KEYS,
                DIM,
                HAS_CAP,
            )
            if IS_SPLIT:
                part = (
                    (tl.load(tiles_ptr + 3 * num_tiles + tile).to(tl.int64) + query) * NUM_HEADS + head
                ) * max_ranges + number
                tl.store(stats_ptr + 2 * part, range_largest, mask=is_row)
                tl.store(stats_ptr + 2 * part + 1, range_mass, mask=is_row)
                tl.store(parts_ptr + (part * HEAD_DIM)[:, None] + at[None, :], range_total, mask=is_in)
            else:
                largest, mass, total = merge(largest, mass, total, range_largest, range_mass, range_total)
        if not IS_SPLIT:
            out = finished(largest, mass, total, sinks_ptr, head, is_row)
            tl.store(
                out_ptr + (token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + at[None, :],
                rounded(out, out_ptr.dtype.element_ty),
                mask=is_in,
            )


@triton.jit(do_not_specialize=["num_parts", "max_ranges"], do_not_specialize_on_alignment=["merged_ptr"])
def merge_ranges(
    merged_ptr,
    parts_ptr,
    stats_ptr,
    sinks_ptr,
    out_ptr,
    num_parts,
    max_ranges,
    window,
    NUM_HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    NUM_BEFORE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Merge what `attend` wrote by range, in order: a program a query and KV head.

    merged: [2, num_parts] int32: each query's token in the step, and how many tokens of its
    sequence are up to it (0: padding); sinks, SHARING, NUM_BEFORE, PLACES: as in `attend`.
    """
    query, kv_head = tl.program_id(0), tl.program_id(1)
    end = tl.load(merged_ptr + num_parts + query)
    if end > 0:
        token = tl.load(merged_ptr + query).to(tl.int64)
        of_group = tl.arange(0, PLACES)
        head = kv_head * SHARING - NUM_BEFORE + of_group
        is_row = (of_group < SHARING) & (head >= 0) & (head < NUM_HEADS)
        at = tl.arange(0, DIM)
        is_in = is_row[:, None] & (at < HEAD_DIM)[None, :]
        largest = tl.full([PLACES], float("-inf"), tl.float32)
        mass = tl.zeros([PLACES], tl.float32)
        total = tl.zeros([PLACES, DIM], tl.float32)
        for number in range(range_of(tl.maximum(end - window, 0), RANGE), range_of(end - 1, RANGE) + 1):
            part = (query.to(tl.int64) * NUM_HEADS + head) * max_ranges + number
            range_largest = tl.load(stats_ptr + 2 * part, mask=is_row, other=float("-inf"))
            range_mass = tl.load(stats_ptr + 2 * part + 1, mask=is_row, other=0.0)
            range_total = tl.load(parts_ptr + (part * HEAD_DIM)[:, None] + at[None, :], mask=is_in, other=0.0)
            largest, mass, total = merge(largest, mass, total, range_largest, range_mass, range_total)
        out = finished(largest, mass, total, sinks_ptr, head, is_row)
        tl.store(
            out_ptr + (token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + at[None, :],
            rounded(out, out_ptr.dtype.element_ty),
            mask=is_in,
        )
