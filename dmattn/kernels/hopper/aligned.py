"""A copy of a bias of pairs in rows that the copy engine can address, where so many (batch, head) read it that it costs less than it saves.

Likewise back: a gradient in such rows, copied to where it belongs. Lanes of a warp have numbers side by side, so that each load and each store
of a warp is one stretch of memory, wherever rows begin. Stores of 8 numbers a lane took as long, loads of shifted words up to twice as long
(docs/history.md, "Rows of other models, and dS handed on").
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.launch import launch
from ..base.layout import Sequence, Span, load_tile, store_tile, strided
from ..base.leading import by_entry, with_entries
from ..base.overlap import follow
from .addressing import UNIT

ROWS, COLS, WARPS = 8, 256, 4


def aligned_copy(bias: Any) -> Any:
    """`bias`, numbers of 16 bits (B, H, Sq, Sk) or what stands for them, in a copy as :func:`empty_aligned` has it."""
    source = by_entry(bias)
    target = empty_aligned(source)
    copy_pairs(source, target)
    return with_entries(target, bias)


def empty_aligned(like: Tensor) -> Tensor:
    """Room for numbers of 16 bits like (B, H, Sq, Sk), each row at a multiple of 16 bytes."""
    *rows, width = like.shape
    return torch.empty((*rows, triton.cdiv(width, UNIT) * UNIT), dtype=like.dtype, device=like.device)[..., :width]


def copy_pairs(source: Tensor, target: Tensor) -> None:
    """Fill `target` from `source`, both (B, H, Sq, Sk) of any strides."""
    batch, heads, height, width = target.shape
    launch(
        _copy_pairs_kernel,
        triton.cdiv(height, ROWS) * triton.cdiv(width, COLS) * heads * batch,
        source=strided(source, heads),
        target=strided(target, heads),
        heads=heads,
        height=height,
        width=width,
        BLOCK_M=ROWS,
        BLOCK_N=COLS,
        num_warps=WARPS,
    )


@gluon.jit
def _copy_pairs_kernel(source, target, heads, height, width, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """One program: a tile. Grid of one axis: blocks of columns fastest, then blocks of rows, heads, batch entries."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    follow()
    across, down = gl.cdiv(width, BLOCK_N), gl.cdiv(height, BLOCK_M)
    program = gl.program_id(0)
    entry = program // (across * down)
    seq = Sequence(entry // heads, entry % heads, height, width)
    rows = Span(program // across % down * BLOCK_M, gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), height)
    cols = Span(program % across * BLOCK_N, gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)), width)
    store_tile(target, seq, rows, cols, load_tile(source, seq, rows, cols))
