"""Keys from the lowest rank to the highest: short runs sorted on chip, then merged several at a time by counting.

A key's place in a merged run is the number of lower keys in each of the runs merged, found by binary search: no two keys are equal, so
every place is taken once. Work O(N log N), memory O(N).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..replay import launch
from .ascending import ascending
from .layout import Sequence, Span, inside, load_rows, strided
from .sequence import place

RUN = 1024  # keys of a run that one program sorts
INTERPRETED_RUN = 64  # the interpreter takes seconds for a longer one
MERGED = 4  # runs at a time
BLOCK = 128  # keys of a program that merges; a divisor of the keys of MERGED runs
_PADDING = tl.constexpr((1 << 63) - 1)
HIDDEN = tl.constexpr(-(1 << 31))  # the high half of the number of a key that is not valid


def ranked(key_bias: Tensor, valid: Tensor | None) -> Tensor:
    """(sequences, Sk) int64, ascending: a number that follows the key's score in the high half, its position in the low.

    `key_bias` (B, Hk, Sk) of any strides; `valid` broadcasts to it.
    """
    batch, heads, len_k = key_bias.shape
    run = RUN if key_bias.device.type != "cpu" else min(RUN, INTERPRETED_RUN)
    numbers: Any = torch.empty((batch * heads, len_k), dtype=torch.int64, device=key_bias.device)
    launch(
        _sort_kernel,
        batch * heads * triton.cdiv(len_k, run),
        key_bias=strided(key_bias, heads),
        valid=None if valid is None else strided(valid.expand(key_bias.shape), heads),
        numbers_ptr=numbers,
        heads=heads,
        len_k=len_k,
        RUN=run,
        num_warps=4,
    )
    while run < len_k:
        merged = torch.empty_like(numbers)
        launch(
            _merge_kernel,
            batch * heads * triton.cdiv(len_k, BLOCK),
            runs_ptr=numbers,
            merged_ptr=merged,
            len_k=len_k,
            RUN=run,
            MERGED=MERGED,
            BLOCK=BLOCK,
            num_warps=4,
        )
        numbers, run = merged, run * MERGED
    return numbers


@triton.jit
def _sort_kernel(key_bias, valid, numbers_ptr, heads, len_k, RUN: tl.constexpr):
    """One program: RUN keys of one (batch, head). Reads key_bias and valid, writes their numbers (sequences, Sk), ascending."""
    block, head, batch = place(len_k, heads, RUN)
    seq = Sequence(batch, head, 0, len_k)
    cols = Span(block * RUN, tl.arange(0, RUN).to(tl.int64), len_k)
    scores = ascending(load_rows(key_bias, seq, cols, 0)).to(tl.int64) + HIDDEN  # [RUN]
    if valid is not None:
        scores = tl.where(load_rows(valid, seq, cols, 0) != 0, scores, HIDDEN)
    numbers = tl.where(inside(cols), (scores << 32) | (cols.start + cols.index), _PADDING)
    row_ptr = numbers_ptr + (batch * heads + head).to(tl.int64) * len_k
    tl.store(row_ptr + cols.start + cols.index, tl.sort(numbers), mask=inside(cols))


@triton.jit
def _merge_kernel(runs_ptr, merged_ptr, len_k, RUN: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK places of one sequence. Reads its runs of RUN ascending numbers, writes each number to its place among MERGED runs."""
    blocks = tl.cdiv(len_k, BLOCK)
    start = tl.program_id(0) % blocks * BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * len_k
    own = start + tl.arange(0, BLOCK)
    numbers = tl.load(runs_ptr + row + own, mask=own < len_k, other=_PADDING)  # [BLOCK]
    group_start = start // (RUN * MERGED) * (RUN * MERGED)
    run_start = group_start + tl.arange(0, MERGED) * RUN  # [MERGED]
    run_length = len_k - run_start  # of the last run; others are longer than RUN
    below = tl.zeros((BLOCK, MERGED), tl.int32)  # how many of a run are lower: what the steps taken so far have shown
    step: tl.constexpr = RUN
    for halvings in tl.static_range(RUN.bit_length()):
        further = below + (step >> halvings)
        real = (further <= run_length[None, :]) & (further <= RUN)
        number = tl.load(runs_ptr + row + run_start[None, :] + further - 1, mask=real, other=_PADDING)
        below = tl.where(number < numbers[:, None], further, below)
    tl.store(merged_ptr + row + group_start + tl.sum(below, 1), numbers, mask=own < len_k)
