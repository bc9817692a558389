"""The plan of a dynamic mask: the queries that keep each key, and the keys in lifetime order, as `dmattn.selection` defines them.

The key at place d, best first, dies at the keep-th smallest of the positions of the keys at places 0 to d - 1: from there on `keep` better
keys are in sight. With F(d, x) the number of keys among the first d places whose position is below x, that is the first x with
F(d, x + 1) >= keep. F grows along both axes, so all deaths lie on one staircase through the square of places and positions.

Cut the square in blocks of about sqrt(N) by sqrt(N). The staircase passes at most one of the cells on each diagonal, 2 sqrt(N) cells in all; a
table of F at the corners tells which, and one program finds the deaths inside each. Work O(N log N), memory O(N), whatever the scores.
"""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..replay import launch
from ..selection import EPOCHS, log_scale
from .launch import on_its_device
from .layout import Span, inside
from .ranks import HIDDEN, ranked
from .sequence import LARGEST

SMALLEST_BLOCK = 64  # places or positions of a cell, at least
MOST_ROWS = 128  # places of a cell at once
TILE = 512  # positions of a program that works on positions alone


@on_its_device
def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`dmattn.selection.lifetimes` returns, bit by bit, and no wait for the device.

    `key_bias` (B, Hk, Sk) of any strides, not empty; `valid` broadcasts to it.
    """
    batch, heads, len_k = key_bias.shape
    sequences = batch * heads
    block = block_size(len_k)
    blocks, tiles = triton.cdiv(len_k, block), triton.cdiv(len_k, TILE)
    order, first, last, places, below, epochs = (
        torch.empty(size, dtype=torch.int32, device=key_bias.device)
        for size in (*4 * [key_bias.shape], (sequences, blocks, blocks), (sequences, tiles, EPOCHS))
    )
    rules = dict(keep=min(keep, len_k), len_q=len_q, len_k=len_k)
    end, span = log_scale(keep, len_q, len_k)
    ranks = ranked(key_bias, valid)
    launch(_count_kernel, sequences * blocks, ranks_ptr=ranks, places_ptr=places, below_ptr=below, len_k=len_k, BLOCK=block, num_warps=4)
    launch(_accumulate_kernel, sequences * triton.cdiv(blocks, 16), below_ptr=below, blocks=blocks, ROWS=128, COLS=16, num_warps=4)
    launch(
        _deaths_kernel,
        sequences * (2 * blocks - 1),
        ranks_ptr=ranks,
        places_ptr=places,
        below_ptr=below,
        last_ptr=last,
        **rules,
        BLOCK=block,
        PART=triton.next_power_of_2(isqrt(block)),
        ROWS=min(block, MOST_ROWS),
        num_warps=4,
    )
    launch(
        _count_epochs_kernel,
        sequences * tiles,
        last_ptr=last,
        epochs_ptr=epochs,
        end=end,
        span=span,
        len_q=len_q,
        len_k=len_k,
        EPOCHS=EPOCHS,
        TILE=TILE,
        num_warps=4,
    )
    launch(
        _order_kernel,
        sequences * tiles,
        last_ptr=last,
        epochs_ptr=epochs,
        first_ptr=first,
        order_ptr=order,
        end=end,
        span=span,
        len_q=len_q,
        len_k=len_k,
        EPOCHS=EPOCHS,
        TILE=TILE,
        TILES_AT_ONCE=64,
        num_warps=4,
    )
    return order, first, last


def block_size(len_k: int) -> int:
    """Places, and positions, of a block: a power of two, and no more blocks than a block has members."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(isqrt(len_k - 1) + 1))


@triton.jit
def _count_kernel(ranks_ptr, places_ptr, below_ptr, len_k, BLOCK: tl.constexpr):
    """One program: BLOCK places of one sequence.

    Reads ranks (sequences, Sk), numbers from the worst key to the best. Writes places, the inverse counted from the best, and its row of
    below (sequences, blocks, blocks): how many of these places have a position in the first 1, 2, ... blocks of positions.
    """
    blocks = tl.cdiv(len_k, BLOCK)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    places = Span(block * BLOCK, tl.arange(0, BLOCK), len_k)
    positions = _positions(ranks_ptr, sequence, places)  # [BLOCK]
    tl.store(_row(places_ptr, sequence, len_k) + positions, places.start + places.index, mask=inside(places))
    counts = tl.histogram(positions // BLOCK, BLOCK, mask=inside(places))  # [BLOCK], of which `blocks` are real
    column = tl.arange(0, BLOCK)
    row_ptr = _row(below_ptr, sequence, blocks * blocks) + block * blocks
    tl.store(row_ptr + column, tl.cumsum(counts, 0), mask=column < blocks)


@triton.jit
def _accumulate_kernel(below_ptr, blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: COLS columns of below (sequences, blocks, blocks) of one sequence, replaced by their running sums over the rows."""
    parts = tl.cdiv(blocks, COLS)
    sequence = tl.program_id(0) // parts
    cols = Span(tl.program_id(0) % parts * COLS, tl.arange(0, COLS), blocks)
    table_ptr = _row(below_ptr, sequence, blocks * blocks)
    total = tl.zeros((COLS,), tl.int32)
    for start in range(0, blocks, ROWS):
        rows = Span(start, tl.arange(0, ROWS), blocks)
        pointers = table_ptr + (rows.start + rows.index)[:, None] * blocks + (cols.start + cols.index)[None, :]  # [ROWS, COLS]
        real = inside(rows)[:, None] & inside(cols)[None, :]
        counts = tl.load(pointers, mask=real, other=0)
        tl.store(pointers, tl.cumsum(counts, 0) + total[None, :], mask=real)
        total += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["keep", "len_q"])
def _deaths_kernel(
    ranks_ptr,
    places_ptr,
    below_ptr,
    last_ptr,
    keep,
    len_q,
    len_k,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: the cell, BLOCK places by BLOCK positions, in which the staircase passes one diagonal of one sequence.

    Reads ranks, places, and the table below. Writes last (sequences, Sk), by position, of the keys whose death is in
    the cell. Every key gets its own from one program: the first `keep` places, which never die, from the cells at the last positions.
    """
    blocks = tl.cdiv(len_k, BLOCK)
    diagonal = tl.program_id(0) % (2 * blocks - 1)
    sequence = tl.program_id(0) // (2 * blocks - 1)
    table_ptr = _row(below_ptr, sequence, blocks * blocks)
    row, column = _crossing(table_ptr, diagonal, keep, blocks, BLOCK)
    corner = tl.load(table_ptr + (row - 1) * blocks + column - 1, mask=(row > 0) & (column > 0), other=0)  # F where the cell begins

    row_start = row * BLOCK
    column_start = column * BLOCK
    own_places_ptr = _row(places_ptr, sequence, len_k)
    cols = Span(column_start, tl.arange(0, BLOCK), len_k)  # positions
    earlier = tl.load(own_places_ptr + cols.start + cols.index, mask=inside(cols), other=LARGEST) < row_start  # [BLOCK]
    earlier = tl.cumsum(tl.sum(tl.reshape(earlier.to(tl.int32), (BLOCK // PART, PART)), 1), 0)  # [BLOCK // PART], with a place above the cell
    ends = column_start + PART * (1 + tl.arange(0, BLOCK // PART))
    from_start = corner  # F at the first position of the cell, at the place where the rows below begin
    from_ends = corner + earlier  # and at the end of each PART of its positions
    offset = len_k - len_q
    for start in range(0, BLOCK, ROWS):
        rows = Span(row_start + start, tl.arange(0, ROWS), len_k)  # places
        positions = _positions(ranks_ptr, sequence, rows)  # [ROWS]
        hidden = tl.load(_ranks(ranks_ptr, sequence, rows), mask=inside(rows), other=0) >> 32 == HIDDEN
        lower = (positions < column_start).to(tl.int32)
        at_start = from_start + tl.cumsum(lower, 0) - lower
        from_start += tl.sum(lower, 0)
        lower = (positions[:, None] < ends[None, :]).to(tl.int32)
        at_ends = from_ends[None, :] + tl.cumsum(lower, 0) - lower  # [ROWS, BLOCK // PART]
        from_ends += tl.sum(lower, 0)

        short = at_ends < keep
        passed = tl.sum(short.to(tl.int32), 1)  # [ROWS], the parts before the one with the death
        wanted = keep - tl.maximum(at_start, tl.max(tl.where(short, at_ends, 0), 1))
        here = (at_start < keep) & (passed < BLOCK // PART)
        part = column_start + passed * PART
        members = part[:, None] + tl.arange(0, PART)[None, :]  # [ROWS, PART], positions
        rivals = tl.load(own_places_ptr + members, mask=here[:, None] & (members < len_k), other=LARGEST)
        better = tl.cumsum((rivals < (rows.start + rows.index)[:, None]).to(tl.int32), 1)
        death = tl.where(here, part + tl.sum((better < wanted[:, None]).to(tl.int32), 1), len_k)
        here = here | ((column == blocks - 1) & (passed == BLOCK // PART))

        lives = (death > positions) & (death > offset) & ~hidden
        death = tl.where(lives, tl.minimum(death - offset, len_q), 0)
        tl.store(_row(last_ptr, sequence, len_k) + positions, death, mask=here & inside(rows))


@triton.jit(do_not_specialize=["end", "span", "len_q"])
def _count_epochs_kernel(last_ptr, epochs_ptr, end, span, len_q, len_k, EPOCHS: tl.constexpr, TILE: tl.constexpr):
    """One program: TILE positions of one sequence.

    Reads last, writes its row of epochs (sequences, tiles, EPOCHS): how many keys die in each.
    """
    tiles = tl.cdiv(len_k, TILE)
    sequence = tl.program_id(0) // tiles
    cols = Span(tl.program_id(0) % tiles * TILE, tl.arange(0, TILE), len_k)
    last = tl.load(_row(last_ptr, sequence, len_k) + cols.start + cols.index, mask=inside(cols), other=0)  # [TILE]
    counts = tl.histogram(_epoch(last, end, span, len_q, len_k, EPOCHS), EPOCHS, mask=last > 0)
    tl.store(_row(epochs_ptr, tl.program_id(0), EPOCHS) + tl.arange(0, EPOCHS), counts)


@triton.jit(do_not_specialize=["end", "span", "len_q"])
def _order_kernel(
    last_ptr,
    epochs_ptr,
    first_ptr,
    order_ptr,
    end,
    span,
    len_q,
    len_k,
    EPOCHS: tl.constexpr,
    TILE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
):
    """One program: TILE positions of one sequence. Reads last and epochs; writes first, and the positions where they stand in the order."""
    tiles = tl.cdiv(len_k, TILE)
    own = tl.program_id(0) % tiles
    sequence = tl.program_id(0) // tiles
    epoch = tl.arange(0, EPOCHS)
    total = tl.zeros((EPOCHS,), tl.int32)
    earlier = tl.zeros((EPOCHS,), tl.int32)
    for chunk in range(0, tiles, TILES_AT_ONCE):
        tile = tl.arange(0, TILES_AT_ONCE)[:, None]
        pointers = _row(epochs_ptr, sequence, tiles * EPOCHS) + (chunk + tile) * EPOCHS + epoch[None, :]
        counts = tl.load(pointers, mask=tile < tiles - chunk, other=0)  # [TILES_AT_ONCE, EPOCHS]
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(tile < own - chunk, counts, 0), 0)

    cols = Span(own * TILE, tl.arange(0, TILE), len_k)
    position = cols.start + cols.index  # [TILE]
    last = tl.load(_row(last_ptr, sequence, len_k) + position, mask=inside(cols), other=0)  # [TILE]
    dies = ((_epoch(last, end, span, len_q, len_k, EPOCHS)[:, None] == epoch[None, :]) & (last > 0)[:, None]).to(tl.int32)  # [TILE, EPOCHS]
    before = earlier[None, :] + tl.cumsum(dies, 0) - dies  # keys of the epoch at smaller positions
    start = tl.cumsum(total, 0) - total  # [EPOCHS]
    slots = tl.where((epoch % 2 == 0)[None, :], start[None, :] + before, (start + total - 1)[None, :] - before)
    nobody = tl.sum(total) + position - tl.sum(before, 1)  # [TILE], the slots of keys that no query keeps
    slot = tl.where(last > 0, tl.sum(dies * slots, 1), nobody)

    tl.store(_row(first_ptr, sequence, len_k) + position, tl.maximum(position - (len_k - len_q), 0), mask=inside(cols))
    tl.store(_row(order_ptr, sequence, len_k) + slot, position, mask=inside(cols))


@triton.jit
def _crossing(table_ptr, diagonal, keep, blocks, BLOCK: tl.constexpr):
    """(row, column) of the cell in which the staircase passes a diagonal: the first whose far corner has F >= keep, or the last of all."""
    shift = blocks - 1 - diagonal  # column - row on the diagonal
    low = tl.maximum(-shift, 0)
    high = tl.minimum(diagonal, blocks - 1)
    rows = low + tl.arange(0, BLOCK)  # no more blocks than a block has members
    corners = tl.load(table_ptr + rows * blocks + rows + shift, mask=rows < high, other=keep)
    row = low + tl.sum((corners < keep).to(tl.int32), 0)
    return row, row + shift


@triton.jit
def _positions(ranks_ptr, sequence, places):
    """Positions of the keys at a span of places, counted from the best; LARGEST beyond the last."""
    return tl.load(_ranks(ranks_ptr, sequence, places), mask=inside(places), other=LARGEST).to(tl.int32)


@triton.jit
def _ranks(ranks_ptr, sequence, places):
    """Pointers to the numbers of the keys at a span of places, counted from the best."""
    return _row(ranks_ptr, sequence, places.length) + (places.length - 1 - places.start - places.index)


@triton.jit
def _epoch(last, end, span, len_q, len_k, EPOCHS: tl.constexpr):
    """The epoch in which a key dies, counted from the end of time."""
    ago = end - ((last + (len_k - len_q)).to(tl.float32).to(tl.int32, bitcast=True) >> 8)
    return tl.where(last < len_q, 1 + ago * (EPOCHS - 1) // span, 0)


@triton.jit
def _row(ptr, row, length):
    """Where a row of a contiguous (rows, length) tensor begins."""
    return ptr + tl.cast(row, tl.int64) * length
