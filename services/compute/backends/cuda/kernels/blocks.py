"""Blocks of the cache: which a sequence has, which slots its tokens go to, and copies of them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["edits_ptr"])
def write_tables(tables_ptr, edits_ptr, count, BLOCK: tl.constexpr):
    """tables[edits[0]] = edits[1]. edits: [2, count] int32: places in the tables, each once, and
    what belongs there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.load(edits_ptr + at, mask=at < count)
    tl.store(tables_ptr + places, tl.load(edits_ptr + count + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["contexts_ptr"])
def find_slots(contexts_ptr, tables_ptr, slots_ptr, table_width, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of a step's tokens, a program a sequence. contexts, tables: as in `attend`; slots:
    [T] int64."""
    sequence = tl.program_id(0)
    end = tl.load(contexts_ptr + 4 * sequence)
    origin = tl.load(contexts_ptr + 4 * sequence + 1)
    table_ptr = tables_ptr + tl.load(contexts_ptr + 4 * sequence + 2).to(tl.int64) * table_width
    for first in range(tl.load(contexts_ptr + 4 * sequence + 3), end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + places // BLOCK_SIZE, mask=places < end, other=0).to(tl.int64)
        tl.store(slots_ptr + origin + places, blocks * BLOCK_SIZE + places % BLOCK_SIZE, mask=places < end)


@triton.jit(do_not_specialize=["count"])
def copy_blocks(bases_ptr, copies_ptr, count, num_words, kv_stride, BLOCK: tl.constexpr):
    """Copy blocks of all layers: a program a layer, keys or values, and BLOCK words of a block. It
    makes all copies, one after the other, and each thread reads only what it writes.

    bases: [layers] int64, where their caches begin; copies: [count, 2] int64, (from, to); num_words:
    of a block, of eight bytes; kv_stride: from keys to values, in words.
    """
    base = (
        tl.load(bases_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int64)) + tl.program_id(1).to(tl.int64) * kv_stride
    )
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    for number in range(count):
        source, target = tl.load(copies_ptr + 2 * number), tl.load(copies_ptr + 2 * number + 1)
        tl.store(
            base + target * num_words + at,
            tl.load(base + source * num_words + at, mask=at < num_words),
            mask=at < num_words,
        )
