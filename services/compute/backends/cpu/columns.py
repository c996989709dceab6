"""Columns of packed weights (kernels.h): a part of a layer that was packed whole, which a rank
restores.

A tile's columns stand side by side in words of four bytes, whatever their type is, and so do a
pair's scales and other numbers: columns are moved without a look at what they hold.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

PAIR, COLUMNS = 32, 16
WORD_BYTES = 4

# neighbouring columns: where they begin in one layer, where in the other that they come from, and
# how many they are
Run = tuple[int, int, int]


def packed_runs(outputs: Sequence[range], *, is_gated: bool) -> list[Run]:
    """The packed columns of a layer with these outputs of another's."""
    runs: list[Run] = []
    at = 0
    for some in outputs:
        runs += _gated_runs(at, some) if is_gated else [(at, some.start, len(some))]
        at += len(some)
    return runs


def _gated_runs(at: int, outputs: range) -> Iterator[Run]:
    """Tiles of gates and of ups take turns."""
    source = outputs.start
    while source < outputs.stop:
        left = outputs.stop - source
        if at % COLUMNS == source % COLUMNS == 0 and left >= COLUMNS:
            count = left // COLUMNS * COLUMNS
            yield 2 * at, 2 * source, 2 * count
        else:
            count = min(left, COLUMNS - at % COLUMNS, COLUMNS - source % COLUMNS)
            for up in (0, COLUMNS):
                yield at // COLUMNS * PAIR + at % COLUMNS + up, source // COLUMNS * PAIR + source % COLUMNS + up, count
        at, source = at + count, source + count


def of_columns(name: str, part: Tensor, tile_bytes: int) -> Tensor:
    """A part of a packed layer as [blocks, rows of a block, columns of a block, size]."""
    if name == "data":
        return part.view(-1, tile_bytes // (COLUMNS * WORD_BYTES), COLUMNS, WORD_BYTES)
    return part.view(-1, 1, PAIR, 1) if part.dim() == 1 else part[..., None]


def copy_columns(to: Tensor, source: Tensor, runs: Sequence[Run]) -> None:
    """Copy these columns between parts as of_columns gives them: whole blocks where they match."""
    width = to.shape[2]
    for at, first, count in runs:
        done = 0
        while done < count:
            (block, inside), (from_block, from_inside) = divmod(at + done, width), divmod(first + done, width)
            left = count - done
            if inside == from_inside == 0 and left >= width:
                blocks = left // width
                to[block : block + blocks].copy_(source[from_block : from_block + blocks])
                done += blocks * width
            else:
                step = min(left, width - inside, width - from_inside)
                to[block, :, inside : inside + step].copy_(source[from_block, :, from_inside : from_inside + step])
                done += step
