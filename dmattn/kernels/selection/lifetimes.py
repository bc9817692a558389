"""The plan of a dynamic mask: the queries that keep each key, and the keys in lifetime order, as `dmattn.selection` defines them.

The key at place d, best first, dies at the keep-th smallest of the positions of the keys at places 0 to d - 1: from there on `keep` better
keys are in sight. With F(d, x) the number of keys among the first d places whose position is below x, that is the first x with
F(d, x + 1) >= keep. F grows along both axes, so all deaths lie on one staircase through the square of places and positions.

Cut the square in blocks of about sqrt(N) by sqrt(N). The staircase passes at most one of the cells on each diagonal, 2 sqrt(N) cells in all; a
table of F at the corners tells which, and one program finds the deaths inside each. The better keys of a place are a set of positions there, as
the bits of words: no two keys share a bit, so a running sum is a running union. Work O(N log N), memory O(N), whatever the scores.
"""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...selection import EPOCHS, log_scale
from ..base.launch import launch, on_its_device
from ..base.layout import Span, inside
from ..base.overlap import follow
from ..base.place import LARGEST
from .ranks import is_valid, position_of, ranked

SMALLEST_BLOCK = 64  # places or positions of a cell, at least
SMALLEST_TILE, LARGEST_TILE = 256, 1024  # positions of a program that works on positions alone


@on_its_device
def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`dmattn.selection.lifetimes` returns, bit by bit, and no wait for the device.

    `key_bias` (B, Hk, Sk) of any strides, not empty; `valid` broadcasts to it.
    """
    batch, heads, len_k = key_bias.shape
    sequences = batch * heads
    block = block_size(len_k)
    tile = min(max(SMALLEST_TILE, triton.next_power_of_2(triton.cdiv(len_k, 128))), LARGEST_TILE)
    blocks, tiles = triton.cdiv(len_k, block), triton.cdiv(len_k, tile)
    order, first, last, places, below, epochs = (
        torch.empty(size, dtype=torch.int32, device=key_bias.device)
        for size in (*4 * [key_bias.shape], (sequences, blocks, blocks), (sequences, tiles, EPOCHS))
    )
    end, span = log_scale(keep, len_q, len_k)
    dying = dict(last_ptr=last, epochs_ptr=epochs, end=end, span=span, len_q=len_q, len_k=len_k, EPOCHS=EPOCHS, TILE=tile)
    ranks = ranked(key_bias, valid)
    launch(
        _count_kernel,
        sequences * blocks,
        ranks_ptr=ranks,
        places_ptr=places,
        below_ptr=below,
        len_k=len_k,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    launch(_accumulate_kernel, sequences * triton.cdiv(blocks, 16), below_ptr=below, blocks=blocks, ROWS=128, COLS=16, num_warps=4)
    launch(
        _deaths_kernel,
        sequences * (2 * blocks - 1),
        ranks_ptr=ranks,
        places_ptr=places,
        below_ptr=below,
        last_ptr=last,
        keep=min(keep, len_k),
        len_q=len_q,
        len_k=len_k,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(blocks),
        WORD=min(block, 64),
        num_warps=1 if block <= 256 else block // 128,
    )
    launch(_count_epochs_kernel, sequences * tiles, **dying, num_warps=4)
    launch(
        _order_kernel,
        sequences * tiles,
        first_ptr=first,
        order_ptr=order,
        **dying,
        TILES_AT_ONCE=64,
        num_warps=2 if tile <= 256 else 4,
    )
    return order, first, last


def block_size(len_k: int) -> int:
    """Places, and positions, of a block: a power of two, of which there are at most twice as many as it has members."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(isqrt((len_k - 1) // 2) + 1))


@triton.jit
def _count_kernel(ranks_ptr, places_ptr, below_ptr, len_k, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """One program: BLOCK places of one sequence.

    Reads ranks (sequences, Sk), numbers of keys from the best to the worst. Writes places, the inverse, and its row of below
    (sequences, blocks, blocks): how many of these places have a position in the first 1, 2, ... blocks of positions.
    """
    follow()
    blocks = tl.cdiv(len_k, BLOCK)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    places = Span(block * BLOCK, tl.arange(0, BLOCK), len_k)
    positions = position_of(_numbers(ranks_ptr, sequence, places))  # [BLOCK]
    tl.store(_row(places_ptr, sequence, len_k) + positions, places.start + places.index, mask=inside(places))
    counts = tl.histogram(positions // BLOCK, BLOCKS, mask=inside(places))  # [BLOCKS], of which `blocks` are real
    column = tl.arange(0, BLOCKS)
    row_ptr = _row(below_ptr, sequence, blocks * blocks) + block * blocks
    tl.store(row_ptr + column, tl.cumsum(counts, 0), mask=column < blocks)


@triton.jit
def _accumulate_kernel(below_ptr, blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program: COLS columns of below (sequences, blocks, blocks) of one sequence, replaced by their running sums over the rows."""
    follow()
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
    ranks_ptr, places_ptr, below_ptr, last_ptr, keep, len_q, len_k, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WORD: tl.constexpr
):  # fmt: skip
    """One program: the cell, BLOCK places by BLOCK positions, in which the staircase passes one diagonal of one sequence.

    Reads ranks, places, and the table below. Writes last (sequences, Sk), by position, of the keys whose death is in
    the cell. Every key gets its own from one program: the first `keep` places, which never die, from the cells at the last positions.
    """
    follow()
    blocks = tl.cdiv(len_k, BLOCK)
    diagonal = tl.program_id(0) % (2 * blocks - 1)
    sequence = tl.program_id(0) // (2 * blocks - 1)
    table_ptr = _row(below_ptr, sequence, blocks * blocks)
    row, column = _crossing(table_ptr, diagonal, keep, blocks, BLOCKS)
    corner = tl.load(table_ptr + (row - 1) * blocks + column - 1, mask=(row > 0) & (column > 0), other=0)  # F where the cell begins
    rows = Span(row * BLOCK, tl.arange(0, BLOCK), len_k)  # places
    numbers = _numbers(ranks_ptr, sequence, rows)
    positions = position_of(numbers)  # [BLOCK]
    lower = (positions < column * BLOCK).to(tl.int32)
    wanted = keep - (corner + tl.cumsum(lower, 0) - lower)  # better keys from the first position of the cell on

    start = column * BLOCK  # of a word, among positions
    death_start = tl.where(wanted > 0, len_k, -1)  # [BLOCK], of the word that has the death; -1 where that is before the cell
    death_bits = tl.zeros((BLOCK,), tl.uint32)
    death_number = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.static_range(BLOCK // WORD):
        members = Span(start, tl.arange(0, WORD), len_k)
        above = tl.load(_row(places_ptr, sequence, len_k) + start + members.index, mask=inside(members), other=LARGEST) < rows.start
        own = _bits((positions >= start) & (positions < start + WORD), positions % WORD)
        better = tl.sum(_bits(above, members.index), 0) + tl.cumsum(own, 0) - own
        for half in tl.static_range(2):
            bits = (better >> (32 * half)).to(tl.uint32)
            ones = _ones(bits)
            here = (wanted > 0) & (wanted <= ones)
            death_start = tl.where(here, start + 32 * half, death_start)
            death_bits = tl.where(here, bits, death_bits)
            death_number = tl.where(here, wanted, death_number)
            wanted -= ones
        start += WORD
    death = death_start + _bit_place(death_bits, death_number)
    here = tl.where(wanted > 0, column == blocks - 1, death_start >= 0)

    offset = len_k - len_q
    lives = (death > positions) & (death > offset) & is_valid(numbers)
    death = tl.where(lives, tl.minimum(death - offset, len_q), 0)
    tl.store(_row(last_ptr, sequence, len_k) + positions, death, mask=here & inside(rows))


@triton.jit(do_not_specialize=["end", "span", "len_q"])
def _count_epochs_kernel(last_ptr, epochs_ptr, end, span, len_q, len_k, EPOCHS: tl.constexpr, TILE: tl.constexpr):
    """One program: TILE positions of one sequence.

    Reads last, writes its row of epochs (sequences, tiles, EPOCHS): how many keys die in each.
    """
    follow()
    tiles = tl.cdiv(len_k, TILE)
    sequence = tl.program_id(0) // tiles
    cols = Span(tl.program_id(0) % tiles * TILE, tl.arange(0, TILE), len_k)
    last = tl.load(_row(last_ptr, sequence, len_k) + cols.start + cols.index, mask=inside(cols), other=0)  # [TILE]
    counts = tl.histogram(_epoch(last, end, span, len_q, len_k, EPOCHS), EPOCHS, mask=last > 0)
    tl.store(_row(epochs_ptr, tl.program_id(0), EPOCHS) + tl.arange(0, EPOCHS), counts)


@triton.jit(do_not_specialize=["end", "span", "len_q"])
def _order_kernel(
    last_ptr, epochs_ptr, first_ptr, order_ptr, end, span, len_q, len_k, EPOCHS: tl.constexpr, TILE: tl.constexpr, TILES_AT_ONCE: tl.constexpr
):  # fmt: skip
    """One program: TILE positions of one sequence. Reads last and epochs; writes first, and the positions where they stand in the order."""
    follow()
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
    dies = last > 0
    died = tl.where(dies, _epoch(last, end, span, len_q, len_k, EPOCHS), 0)
    before = _before(died, dies, EPOCHS, TILE)
    start = tl.cumsum(total, 0) - total + tl.where(epoch % 2 == 0, earlier, total - 1 - earlier)  # [EPOCHS], of this tile
    slot = tl.gather(start, died, 0) + tl.where(died % 2 == 0, before, -before)
    kept = tl.sum(earlier) + tl.cumsum(dies.to(tl.int32), 0) - dies.to(tl.int32)  # at smaller positions
    slot = tl.where(dies, slot, tl.sum(total) + position - kept)

    tl.store(_row(first_ptr, sequence, len_k) + position, tl.maximum(position - (len_k - len_q), 0), mask=inside(cols))
    tl.store(_row(order_ptr, sequence, len_k) + slot, position, mask=inside(cols))


@triton.jit
def _before(died, dies, EPOCHS: tl.constexpr, TILE: tl.constexpr):
    """How many keys of a tile die in the epoch of each, at smaller positions: counters of several epochs share a number."""
    BITS: tl.constexpr = 8 if TILE <= 256 else 16  # of a counter, for up to TILE - 1 keys
    SHARE: tl.constexpr = 64 // BITS
    shift = (died % SHARE * BITS).to(tl.int64)
    one = tl.where(dies, tl.full((TILE,), 1, tl.int64) << shift, 0)
    before = tl.zeros((TILE,), tl.int64)
    for group in tl.static_range(EPOCHS // SHARE):
        member = died // SHARE == group
        counts = tl.cumsum(tl.where(member, one, 0), 0) - one
        before = tl.where(member, (counts >> shift) & ((1 << BITS) - 1), before)
    return before.to(tl.int32)


@triton.jit
def _crossing(table_ptr, diagonal, keep, blocks, BLOCKS: tl.constexpr):
    """(row, column) of the cell in which the staircase passes a diagonal: the first whose far corner has F >= keep, or the last of all."""
    shift = blocks - 1 - diagonal  # column - row on the diagonal
    low = tl.maximum(-shift, 0)
    high = tl.minimum(diagonal, blocks - 1)
    rows = low + tl.arange(0, BLOCKS)
    corners = tl.load(table_ptr + rows * blocks + rows + shift, mask=rows < high, other=keep)
    row = low + tl.sum((corners < keep).to(tl.int32), 0)
    return row, row + shift


@triton.jit
def _numbers(ranks_ptr, sequence, places):
    """Numbers of the keys at a span of places."""
    return tl.load(_row(ranks_ptr, sequence, places.length) + places.start + places.index, mask=inside(places), other=0)


@triton.jit
def _bits(real, index):
    """Words of 64 bits with the bit of an index set, where it is real."""
    return tl.where(real, tl.full(index.shape, 1, tl.uint64) << index.to(tl.uint64), 0)


@triton.jit
def _ones(bits):
    """How many bits of words of 32 are set."""
    octets = _ones_of_parts(bits)[2]
    return ((octets * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bit_place(bits, number):
    """Where the number-th of the set bits of words of 32 stands, counted from 1; 0 where number is 0."""
    pairs, nibbles, octets, halves = _ones_of_parts(bits)
    place = tl.zeros(bits.shape, tl.uint32)
    place, number = _pass_part(halves, place, number, 16)
    place, number = _pass_part(octets, place, number, 8)
    place, number = _pass_part(nibbles, place, number, 4)
    place, number = _pass_part(pairs, place, number, 2)
    place, number = _pass_part(bits, place, number, 1)
    return place.to(tl.int32)


@triton.jit
def _ones_of_parts(bits):
    """How many bits are set in each 2, 4, 8 and 16 bits of words of 32, in the place of those bits."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    return pairs, nibbles, octets, (octets + (octets >> 8)) & 0x00FF00FF


@triton.jit
def _pass_part(ones, place, number, WIDTH: tl.constexpr):
    """(place, number) of a set bit after a step past a part of WIDTH bits, if it stands beyond that."""
    passed = ((ones >> place) & (2 * WIDTH - 1)).to(tl.int32)
    beyond = number > passed
    return place + tl.where(beyond, WIDTH, 0).to(tl.uint32), number - tl.where(beyond, passed, 0)


@triton.jit
def _epoch(last, end, span, len_q, len_k, EPOCHS: tl.constexpr):
    """The epoch in which a key dies, counted from the end of time."""
    ago = end - ((last + (len_k - len_q)).to(tl.float32).to(tl.int32, bitcast=True) >> 8)
    return tl.where(last < len_q, 1 + ago * (EPOCHS - 1) // span, 0)


@triton.jit
def _row(ptr, row, length):
    """Where a row of a contiguous (rows, length) tensor begins."""
    return ptr + tl.cast(row, tl.int64) * length
