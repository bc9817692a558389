"""Bounds of the query intervals of every block of keys, by which the kernels pass over blocks that no query of theirs attends."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import Sequence, Span, load_rows, slice_pointer, strided
from .sequence import LARGEST, place


def block_bounds(first: Tensor | None, last: Tensor | None, len_k: int, block_n: int) -> Tensor | None:
    """(B or 1, H or Hk or 1, blocks, 2) int32: over the keys of a block the smallest first and the largest last, of non-empty intervals."""
    if first is None or last is None:
        return None
    first, last = torch.broadcast_tensors(first, last)
    batch, heads = first.shape[:2]
    blocks = triton.cdiv(len_k, block_n)
    bounds = torch.empty((batch, heads, blocks, 2), dtype=torch.int32, device=first.device)
    if bounds.numel():
        _block_bounds_kernel[(batch * heads * blocks,)](
            first=strided(first, heads),
            last=strided(last, heads),
            bounds=strided(bounds, heads),
            heads=heads,
            len_k=len_k,
            BLOCK_N=block_n,
            num_warps=1,
        )
    return bounds


@triton.jit
def _block_bounds_kernel(first, last, bounds, heads, len_k, BLOCK_N: tl.constexpr):
    """One program: one block of keys of one (batch, head). Reads first and last, writes their two bounds."""
    block, head, batch = place(len_k, heads, BLOCK_N)
    seq = Sequence(batch, head, 0, len_k)
    cols = Span(block * BLOCK_N, tl.arange(0, BLOCK_N), len_k)
    first_cols = load_rows(first, seq, cols, LARGEST)
    last_cols = load_rows(last, seq, cols, 0)
    alive = first_cols < last_cols
    pointer = slice_pointer(bounds, seq) + tl.cast(block, tl.int64) * bounds.row
    tl.store(pointer, tl.min(tl.where(alive, first_cols, LARGEST)))
    tl.store(pointer + bounds.col, tl.max(tl.where(alive, last_cols, 0)))
