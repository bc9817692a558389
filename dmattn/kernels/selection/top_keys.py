"""The best keys of a mask under which all queries keep the same: `dmattn.selection.best` by radix selection, without a sort.

A score becomes an unsigned number that orders as scores do, NaN above all and keys that are not valid at 0. The digits of the `keep`-th largest
are found from the highest on: every tile of keys counts its digits, and in the next launch every program adds up the counts of its sequence and
sees for itself which digit it is, and how many keys of the tiles before its own are above. The last launch writes the positions. Work and
memory O(N), whatever the scores; counts are integers, so the order in which they are added makes no difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import launch, on_its_device
from ..base.layout import Sequence, Span, inside, load_rows, strided
from ..base.overlap import follow
from .ascending import ascending

TILE = 4096  # keys at once
MOST_TILES = 64  # programs of a sequence, at most: each reads what all of them counted
PROGRAMS = 512  # of all sequences together, as far as that goes
TILES_AT_ONCE = 32  # whose counts are read together
DIGIT = tl.constexpr(8)  # bits. tl.histogram takes time in proportion to its bins, which makes larger digits slower though they are fewer
BINS = tl.constexpr(1 << DIGIT.value)


class Found(NamedTuple):
    """What a program knows after some digits."""

    known: Any  # these digits of the last key to keep
    wanted: Any  # how many keys that have them
    before: Any  # how many keys of the tiles before are above them
    tied: Any  # how many keys have them
    level: Any  # how many of these are in the tiles before


@on_its_device
def best(key_bias: Tensor, valid: Tensor | None, order: Tensor, first: Tensor | None, last: Tensor | None, len_q: int) -> None:
    """Fill `order` (B, Hk, keep) with positions, ascending, `last` (B, Hk, Sk) with `len_q` or 0, and `first`, one number, with 0.

    `key_bias` (B, Hk, Sk) of any strides, not empty; `valid` broadcasts to it. 1 <= keep <= Sk. Three launches for 16-bit scores, else five;
    no wait for the device.
    """
    batch, heads, len_k = key_bias.shape
    sequences = batch * heads
    parts = triton.cdiv(len_k, TILE)
    steps = triton.cdiv(parts, max(1, min(MOST_TILES, PROGRAMS // sequences)))  # of TILE keys in a program
    tiles = triton.cdiv(parts, steps)
    row = triton.cdiv(len_k, 16) * 16  # a length of which a compiler knows that it can load several keys at once
    numbers, counts, next_counts, state = (
        torch.empty(size, dtype=torch.int32, device=key_bias.device)
        for size in ((sequences, row), *2 * [(sequences, tiles, BINS.value)], (sequences, tiles, 3))
    )
    rules = dict(len_k=len_k, row=row, tiles=tiles, steps=steps, TILE=TILE, num_warps=8)
    shift = (16 if key_bias.element_size() == 2 else 32) - DIGIT.value
    launch(
        _numbers_kernel,
        sequences * tiles,
        key_bias=strided(key_bias, heads),
        valid=None if valid is None else strided(valid.expand(key_bias.shape), heads),
        numbers_ptr=numbers,
        counts_ptr=counts,
        state_ptr=state,
        shift=shift,
        keep=order.shape[-1],
        heads=heads,
        **rules,
    )
    for lower in range(shift - DIGIT.value, -1, -DIGIT.value):
        launch(
            _digits_kernel,
            sequences * tiles,
            numbers_ptr=numbers,
            counts_ptr=counts,
            next_counts_ptr=next_counts,
            state_ptr=state,
            shift=lower,
            **rules,
            TILES_AT_ONCE=TILES_AT_ONCE,
        )
        counts, next_counts = next_counts, counts
    launch(
        _best_kernel,
        sequences * tiles,
        numbers_ptr=numbers,
        counts_ptr=counts,
        state_ptr=state,
        order_ptr=order,
        first_ptr=first,
        last_ptr=last,
        keep=order.shape[-1],
        len_q=len_q,
        **rules,
        TILES_AT_ONCE=TILES_AT_ONCE,
    )


@triton.jit(do_not_specialize=["shift", "keep", "tiles"])
def _numbers_kernel(key_bias, valid, numbers_ptr, counts_ptr, state_ptr, shift, keep, heads, len_k, row, tiles, steps, TILE: tl.constexpr):
    """One program: `steps` times TILE keys of one (batch, head).

    Reads key_bias and valid. Writes numbers (sequences, row), to select by; its counts (sequences, tiles, BINS) of their highest digits; and
    its state (sequences, tiles, 3): the digits known of the last key to keep, how many keys that have them are wanted, and how many keys of
    the tiles before this are above them.
    """
    follow()
    own = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(0) % tiles
    seq = Sequence(tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads, 0, len_k)
    counts = tl.zeros((BINS,), tl.int32)
    for step in range(steps):
        cols = Span((tile * steps + step) * TILE, tl.arange(0, TILE).to(tl.int64), len_k)
        numbers = ascending(load_rows(key_bias, seq, cols, 0))  # [TILE]
        if valid is not None:
            numbers = tl.where(load_rows(valid, seq, cols, 0) != 0, numbers, 0)
        pointers = numbers_ptr + own // tiles * row + cols.start + cols.index
        # to the end of the row, of which the other kernels read all, and use what is inside
        tl.store(pointers, numbers.to(tl.int32, bitcast=True), mask=cols.start + cols.index < row)
        counts += tl.histogram((numbers >> shift).to(tl.int32), BINS, mask=inside(cols))
    tl.store(counts_ptr + own * BINS + tl.arange(0, BINS), counts)
    _save(state_ptr, own, 0, keep, 0)


@triton.jit(do_not_specialize=["shift", "tiles"])
def _digits_kernel(
    numbers_ptr, counts_ptr, next_counts_ptr, state_ptr, shift, len_k, row, tiles, steps, TILE: tl.constexpr, TILES_AT_ONCE: tl.constexpr
):
    """One program: `steps` times TILE keys of one sequence.

    Reads numbers, and the counts of all tiles, from which it finds one more digit. Writes next_counts, of the digits that follow in the
    numbers which have those known, and its state.
    """
    follow()
    own = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(0) % tiles
    found = _next_digit(counts_ptr, state_ptr, own, tile, tiles, TILES_AT_ONCE)
    counts = tl.zeros((BINS,), tl.int32)
    for step in range(steps):
        cols = Span((tile * steps + step) * TILE, tl.arange(0, TILE), len_k)
        numbers = _load(numbers_ptr + own // tiles * row, cols, row)  # [TILE]
        digits = numbers >> shift
        having = (digits >> DIGIT == found.known) & inside(cols)
        if tl.max(having.to(tl.int32)) != 0:
            counts += tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, mask=having)
    tl.store(next_counts_ptr + own * BINS + tl.arange(0, BINS), counts)
    _save(state_ptr, own, found.known.to(tl.int32, bitcast=True), found.wanted, found.before)


@triton.jit(do_not_specialize=["keep", "len_q", "tiles"])
def _best_kernel(
    numbers_ptr, counts_ptr, state_ptr, order_ptr, first_ptr, last_ptr, keep, len_q, len_k, row, tiles, steps,
    TILE: tl.constexpr, TILES_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: `steps` times TILE keys of one sequence.

    Reads numbers, and the counts of all tiles, from which it finds the last digit. Writes its part of order (sequences, keep), and of last
    (sequences, Sk).
    """
    follow()
    own = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(0) % tiles
    found = _next_digit(counts_ptr, state_ptr, own, tile, tiles, TILES_AT_ONCE)
    threshold, before, level = found.known, found.before, found.level
    dropped = found.tied - found.wanted  # keys at the threshold, the first of them
    for step in range(steps):
        cols = Span((tile * steps + step) * TILE, tl.arange(0, TILE), len_k)
        numbers = _load(numbers_ptr + own // tiles * row, cols, row)  # [TILE]
        above = (numbers > threshold) & inside(cols)
        at = (numbers == threshold) & inside(cols)
        both = above.to(tl.int32) + (at.to(tl.int32) << 16)  # two counters in one scan
        earlier = tl.cumsum(both, 0) - both
        order_at = level + (earlier >> 16)
        kept = above | (at & (order_at >= dropped))
        slot = before + (earlier & 0xFFFF) + tl.maximum(order_at - dropped, 0)
        position = cols.start + cols.index
        tl.store(order_ptr + own // tiles * keep + slot, position, mask=kept)
        if last_ptr is not None:
            tl.store(last_ptr + own // tiles * len_k + position, tl.where(kept & (numbers > 0), len_q, 0), mask=inside(cols))
        total = tl.sum(both, 0)
        before += total & 0xFFFF
        level += total >> 16
    if first_ptr is not None:
        tl.store(first_ptr, 0, mask=own == 0)


@triton.jit
def _next_digit(counts_ptr, state_ptr, own, tile, tiles, TILES_AT_ONCE: tl.constexpr):
    """The state, one digit further."""
    known = tl.load(state_ptr + own * 3).to(tl.uint32, bitcast=True)
    wanted = tl.load(state_ptr + own * 3 + 1)
    before = tl.load(state_ptr + own * 3 + 2)
    digits = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    earlier = tl.zeros((BINS,), tl.int32)
    for chunk in range(0, tiles, TILES_AT_ONCE):
        other = chunk + tl.arange(0, TILES_AT_ONCE)[:, None]
        counts = tl.load(counts_ptr + ((own - tile) + other) * BINS + digits[None, :], mask=other < tiles, other=0)  # [TILES_AT_ONCE, BINS]
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(other < tile, counts, 0), 0)
    enough = tl.sum(total, 0) - tl.cumsum(total, 0) + total >= wanted  # with this digit or a larger one
    digit = tl.sum(enough.to(tl.int32), 0) - 1
    wanted -= tl.sum(tl.where(digits > digit, total, 0), 0)
    before += tl.sum(tl.where(digits > digit, earlier, 0), 0)
    tied = tl.sum(tl.where(digits == digit, total, 0), 0)
    level = tl.sum(tl.where(digits == digit, earlier, 0), 0)
    return Found((known << DIGIT) | digit.to(tl.uint32), wanted, before, tied, level)


@triton.jit
def _load(row_ptr, cols, row):
    """The numbers of a span; what lies between its length and that of the row is there, but is nothing."""
    return tl.load(row_ptr + cols.start + cols.index, mask=cols.index < row - cols.start, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _save(state_ptr, own, known, wanted, before):
    """Write the three numbers with which the next digit's search goes on."""
    tl.store(state_ptr + own * 3, known)
    tl.store(state_ptr + own * 3 + 1, wanted)
    tl.store(state_ptr + own * 3 + 2, before)
