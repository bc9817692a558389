"""Sums that several programs make in parts, in float32, which are added in order: the same at every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .launch import launch
from .layout import Sequence, Span, load_tile, store_tile, strided
from .overlap import follow

LEAST_ROOM = 4 << 20  # bytes that all parts of dK and dV may take, be keys and values as few as they may
ROOM_OF_QUERIES = 16 << 20  # the same of out or dQ, where blocks of queries leave processors idle
ROOM_OF_KEYS = 32 << 20  # of dK and dV in float32, where blocks of keys do
PART_OF_KEYS = 25  # or of what keys and values take, one of so many parts
ROWS, COLS = 8, 64  # of a program's tile: small, as results in many parts are small


def even_parts(count: int, most: int) -> int:
    """Into how many parts, at most `most`, so many members are split so that none is empty."""
    parts = max(1, min(count, most))
    return triton.cdiv(count, triton.cdiv(count, parts)) if count else 1


def room_of_queries(problem: Problem, numbers: int) -> int:
    """For how many parts of out or dQ, of so many numbers, there is room."""
    room = max(ROOM_OF_QUERIES, sum(x.numel() * x.element_size() for x in (problem.key, problem.value)) // PART_OF_KEYS)
    return room // max(4 * numbers, 1)


def empty_parts(result: Tensor, count: int) -> Tensor:
    """Where programs store so many parts of a result (B, H, rows, columns): the result itself, or one part after another on the batch axis."""
    return result if count == 1 else _allocate((count * result.shape[0], *result.shape[1:]), result.device)


def _allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def sum_parts(parts: Tensor, result: Tensor) -> None:
    """Fill a result from its parts, added in order and rounded once. One part is the result itself."""
    if parts is result:
        return
    batch, heads, height, width = result.shape
    launch(
        _sum_parts_kernel,
        triton.cdiv(height, ROWS) * triton.cdiv(width, COLS) * batch * heads,
        parts=strided(parts, heads),
        result=strided(result, heads),
        count=parts.shape[0] // batch,
        batch=batch,
        heads=heads,
        height=height,
        width=width,
        BLOCK_M=ROWS,
        BLOCK_N=COLS,
    )


@triton.jit
def _sum_parts_kernel(
    parts, result, count, batch, heads, height, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program: a tile of a result, the sum of that tile in its parts.

    Grid of one axis: blocks of columns fastest, then blocks of rows, heads, batch entries.
    """
    follow()
    blocks_m, blocks_n = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    rows = Span(program // blocks_n % blocks_m * BLOCK_M, tl.arange(0, BLOCK_M).to(tl.int64), height)
    cols = Span(program % blocks_n * BLOCK_N, tl.arange(0, BLOCK_N).to(tl.int64), width)
    head = program // (blocks_m * blocks_n) % heads
    entry = program // (blocks_m * blocks_n) // heads
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for part in tl.range(0, count, loop_unroll_factor=4):  # loads of several parts under way at once
        total += load_tile(parts, Sequence(part * batch + entry, head, height, width), rows, cols)
    store_tile(result, Sequence(entry, head, height, width), rows, cols, total)
