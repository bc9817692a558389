"""Keys from the best to the worst: short runs sorted on chip, then merged several at a time by counting.

A key is a number that is lower the better it is: the high bits follow its score, the low ones its position. A key's place in a merged run is
the number of lower keys in each of the runs merged, found by binary search: no two keys are equal, so every place is taken once. Work
O(N log N), memory O(N).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import launch
from ..base.layout import Sequence, Span, inside, load_rows, strided
from ..base.overlap import follow
from ..base.place import place
from .ascending import ascending

RUN = 1024  # keys of a run that one program sorts
INTERPRETED_RUN = 64  # the interpreter takes seconds for a longer one
MERGED = 4  # runs at a time
BLOCK = 128  # keys of a program that merges; a divisor of the keys of MERGED runs


def ranked(key_bias: Tensor, valid: Tensor | None) -> Tensor:
    """(sequences, Sk), ascending: the numbers of keys, of which `position_of` and `is_valid` tell; int32 where they fit in, else int64.

    `key_bias` (B, Hk, Sk) of any strides; `valid` broadcasts to it.
    """
    batch, heads, len_k = key_bias.shape
    run = RUN if key_bias.device.type != "cpu" else min(RUN, INTERPRETED_RUN)
    fits = key_bias.element_size() == 2 and len_k <= 1 << 16
    numbers: Any = torch.empty((batch * heads, len_k), dtype=torch.int32 if fits else torch.int64, device=key_bias.device)
    launch(
        _sort_kernel,
        batch * heads * triton.cdiv(len_k, run),
        key_bias=strided(key_bias, heads),
        valid=None if valid is None else strided(valid.expand(key_bias.shape), heads),
        numbers_ptr=numbers,
        heads=heads,
        len_k=len_k,
        RUN=run,
        num_warps=8,
    )
    while run < len_k:
        merged = torch.empty_like(numbers)
        launch(
            _merge_kernel,
            batch * heads * triton.cdiv(len_k, min(BLOCK, run)),
            runs_ptr=numbers,
            merged_ptr=merged,
            len_k=len_k,
            RUN=run,
            MERGED=MERGED,
            BLOCK=min(BLOCK, run),
            num_warps=4,
        )
        numbers, run = merged, run * MERGED
    return numbers


@triton.jit
def position_of(numbers):
    """The positions that numbers of keys hold, in the low half of their bits."""
    HALF: tl.constexpr = numbers.dtype.primitive_bitwidth // 2
    return (~numbers & ((1 << HALF) - 1)).to(tl.int32)


@triton.jit
def is_valid(numbers):
    """Whether keys with these numbers are no padding, of which the high half is the highest."""
    HALF: tl.constexpr = numbers.dtype.primitive_bitwidth // 2
    return numbers >> HALF != (1 << (HALF - 1)) - 1


@triton.jit
def _sort_kernel(key_bias, valid, numbers_ptr, heads, len_k, RUN: tl.constexpr):
    """One program: RUN keys of one (batch, head). Reads key_bias and valid, writes their numbers (sequences, Sk), ascending.

    They are sorted by how much worse than the best their scores are, and by how far from the end of the run they stand: 16-bit scores as
    32-bit numbers.
    """
    follow()
    NARROW: tl.constexpr = key_bias.ptr.dtype.element_ty.primitive_bitwidth == 16
    BITS: tl.constexpr = 16 if NARROW else 32
    SORTED: tl.constexpr = tl.int32 if NARROW else tl.int64
    WRITTEN: tl.constexpr = numbers_ptr.dtype.element_ty
    LOW: tl.constexpr = WRITTEN.primitive_bitwidth - BITS
    block, head, batch = place(len_k, heads, RUN)
    seq = Sequence(batch, head, 0, len_k)
    index = tl.arange(0, RUN)
    cols = Span(block * RUN, index.to(tl.int64), len_k)
    scores = ascending(load_rows(key_bias, seq, cols, 0)).to(SORTED)  # [RUN]
    if valid is not None:
        scores = tl.where(load_rows(valid, seq, cols, 0) != 0, scores, 0)
    keys = ((1 << BITS) - 1 - scores) * RUN + (RUN - 1 - index)
    keys = tl.sort(tl.where(inside(cols), keys, (1 << BITS) * RUN))
    positions = cols.start + (RUN - 1 - keys % RUN)
    worse = (keys // RUN - (1 << (BITS - 1))).to(WRITTEN)
    row_ptr = numbers_ptr + (batch * heads + head).to(tl.int64) * len_k
    tl.store(row_ptr + cols.start + cols.index, (worse << LOW) | ((1 << LOW) - 1 - positions.to(WRITTEN)), mask=inside(cols))


@triton.jit
def _merge_kernel(runs_ptr, merged_ptr, len_k, RUN: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK numbers of one sequence. Reads MERGED runs of RUN ascending numbers, writes its own to their places among them all.

    They lie in one run, and are sought in all the others at once.
    """
    follow()
    PADDING: tl.constexpr = (1 << (runs_ptr.dtype.element_ty.primitive_bitwidth - 1)) - 1
    blocks = tl.cdiv(len_k, BLOCK)
    start = tl.program_id(0) % blocks * BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * len_k
    own = start + tl.arange(0, BLOCK)
    numbers = tl.load(runs_ptr + row + own, mask=own < len_k, other=PADDING)  # [BLOCK]
    group_start = start // (RUN * MERGED) * (RUN * MERGED)
    below = ()  # how many of each other run are lower: what the steps taken so far have shown
    for _ in tl.static_range(MERGED - 1):
        below += (tl.zeros((BLOCK,), tl.int32),)
    step: tl.constexpr = RUN
    for halvings in tl.static_range(RUN.bit_length()):
        shown = ()
        for other in tl.static_range(MERGED - 1):
            run_start = group_start + (start // RUN + 1 + other) % MERGED * RUN
            further = below[other] + (step >> halvings)
            real = further <= tl.minimum(len_k - run_start, RUN)
            number = tl.load(runs_ptr + row + run_start + further - 1, mask=real, other=PADDING)
            shown += (tl.where(number < numbers, further, below[other]),)
        below = shown
    places = group_start + own % RUN
    for other in tl.static_range(MERGED - 1):
        places += below[other]
    tl.store(merged_ptr + row + places, numbers, mask=own < len_k)
