"""What parts of the keys hand on of out and lse, and how it is merged: by the maxima of the parts, always in the same order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, ends_of, inside, sequence, slice_pointer, store_rows, store_tile, strided, strided_by_head
from ..base.overlap import follow
from ..base.rules import LOG2E
from ..base.softmax import join_sink, rescaling, sink2_of
from ..base.tiles import block_dim

MOST_SPLITS = 128  # what a program holds
DIMS = 64  # of values, in a program
ROWS = {4: 8, 8: 8, 16: 4, MOST_SPLITS: 1}  # queries of a program by the most splits, where there are many
MANY = 8  # programs of one query for each processor
# NVIDIA H200, 2026-11-30: two parts of 8192 queries of 128 dims took 0.02 ms by programs of one query (docs/history.md).


class Parts(NamedTuple):
    """What parts of the keys hand on, contiguous float32 tensors with the parts on their first axis."""

    acc: Tensor  # (parts, B, H, Sq, Dv), the sums of weighted values
    sums: Tensor  # (parts, B, H, Sq, 2), the largest score, as an exponent of 2, and the sum of weights

    @classmethod
    def empty(cls, parts: int, out: Tensor) -> "Parts":
        """Room for those of results like `out` (B, H, Sq, Dv)."""
        return cls(*(torch.empty((parts, *out.shape[:3], dims), dtype=torch.float32, device=out.device) for dims in (out.shape[3], 2)))


def merge_splits(problem: Problem, parts: Parts, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Fill `out` and `lse` from up to MOST_SPLITS parts."""
    batch, heads, len_q, value_dim = out.shape
    splits, dims = parts.acc.shape[0], min(DIMS, block_dim(value_dim))
    held = next(count for count in ROWS if splits <= count)
    programs = triton.cdiv(value_dim, dims) * len_q * heads * batch
    rows = ROWS[held] if len_q >= ROWS[held] and programs > MANY * processors(out.device) else 1
    launch(
        _merge_splits_kernel,
        triton.cdiv(value_dim, dims) * triton.cdiv(len_q, rows) * heads * batch,
        acc=strided(parts.acc.flatten(0, 1), heads),
        sums=strided(parts.sums.flatten(0, 1), heads),
        sinks=strided_by_head(sinks),
        ends=ends_of(problem),
        out=strided(out, heads),
        lse=strided(lse, heads),
        entries=batch,
        heads=heads,
        len_q=len_q,
        value_dim=value_dim,
        splits=splits,
        BLOCK_SPLITS=held,
        BLOCK_M=rows,
        BLOCK_DV=dims,
        num_warps=4,
        enable_fp_fusion=False,  # as for delta (base/query_terms.py): lanes that share a sum are to get the same one
    )


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    acc, sums, sinks, ends, out, lse, entries, heads, len_q, value_dim, splits,
    BLOCK_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_DV dims of out of BLOCK_M queries of one (batch, head), and their lse, from their `splits` parts.

    `acc` and `sums` are those of :class:`Parts`, with parts and batch entries as one axis. Grid of one axis: blocks of dims fastest, then those
    of queries, heads, batch entries.
    """
    follow()
    program = tl.program_id(0)
    blocks_m, blocks_d = tl.cdiv(len_q, BLOCK_M), tl.cdiv(value_dim, BLOCK_DV)
    row = program // blocks_d % blocks_m * BLOCK_M
    head = program // (blocks_m * blocks_d) % heads
    batch = program // (blocks_m * blocks_d) // heads
    seq = sequence(ends, batch, head, len_q, 0)
    rows = Span(row, tl.arange(0, BLOCK_M), seq.len_q)
    dims = Span(program % blocks_d * BLOCK_DV, tl.arange(0, BLOCK_DV), value_dim)
    first = Sequence(batch, head, len_q, 0)  # in the first part
    split = tl.arange(0, BLOCK_SPLITS).to(tl.int64)
    queries = (row + rows.index).to(tl.int64)
    places = split[:, None] * entries * sums.batch + queries[None, :] * sums.row  # [BLOCK_SPLITS, BLOCK_M]
    there = (split < splits)[:, None] & inside(rows)[None, :]
    pointers = slice_pointer(sums, first) + places
    part_max = tl.load(pointers, mask=there, other=float("-inf"))
    largest = tl.max(part_max, 0)  # [BLOCK_M]
    factors = rescaling(part_max, largest[None, :], 1.0)
    total = tl.sum(factors * tl.load(pointers + 1, mask=there, other=0.0), 0)
    if sinks is not None:
        alpha, largest, total = join_sink(sink2_of(sinks, seq), largest, total)
        factors *= alpha[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)
    places = split[:, None] * entries * acc.batch + queries[None, :] * acc.row
    pointers = slice_pointer(acc, first) + places[:, :, None] + (dims.start + dims.index)[None, None, :]
    tile = tl.load(pointers, mask=there[:, :, None] & inside(dims)[None, None, :], other=0.0)  # [BLOCK_SPLITS, BLOCK_M, BLOCK_DV]
    store_tile(out, seq, rows, dims, tl.sum(factors[:, :, None] * tile, 0) / divisor[:, None])
    if program % blocks_d == 0:
        store_rows(lse, seq, rows, tl.where(total == 0.0, float("-inf"), (largest + tl.log2(divisor)) / LOG2E))
