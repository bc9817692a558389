"""Attention over two sets of keys as attention over both, for queries whose keys come in turns (`dmattn.distributed.sums`).

PyTorch's operations would write the scaled sum in float32 and read it again: 14 bytes an element of 16 bits where this reads 4 and writes 2.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import launch, on_its_device
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, strided
from ..base.overlap import follow
from ..base.tiles import block_dim

ELEMENTS = 4096  # of a program

OutAndLse = tuple[Tensor, Tensor]


@on_its_device
def join(first: OutAndLse, second: OutAndLse, into: OutAndLse) -> None:
    """Write out (B, H, Sq, Dv), of any dtype but float64, and lse (B, H, Sq), float32, of both sets of keys; `into` may be one of them."""
    batch, heads, len_q, dim = first[0].shape
    if first[0].numel() == 0:
        return
    block = max(1, ELEMENTS // block_dim(dim))
    launch(
        _join_kernel,
        batch * heads * triton.cdiv(len_q, block),
        first=tuple(strided(x, heads) for x in first),
        second=tuple(strided(x, heads) for x in second),
        into=tuple(strided(x, heads) for x in into),
        heads=heads,
        len_q=len_q,
        DIM=dim,
        BLOCK_M=block,
        BLOCK_D=block_dim(dim),
        num_warps=4,
    )


@triton.jit
def _join_kernel(first, second, into, heads, len_q, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: BLOCK_M queries of one (batch, head). Reads out and lse of `first` and `second`, and writes those of `into`.

    Grid of one axis: heads fastest, which lie side by side in memory, then blocks. A row that sees no key of one set keeps what it has of the
    other; one that sees none of either has 0 and -inf.
    """
    follow()
    blocks = tl.cdiv(len_q, BLOCK_M)
    head, block, batch = tl.program_id(0) % heads, tl.program_id(0) // heads % blocks, tl.program_id(0) // heads // blocks
    seq = Sequence(batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M), len_q)
    dims = Span(0, tl.arange(0, BLOCK_D), None if DIM == BLOCK_D else DIM)
    first_out, first_lse = first
    second_out, second_lse = second
    out, lse = into
    first_rows = load_rows(first_lse, seq, rows, float("-inf"))  # [BLOCK_M]
    second_rows = load_rows(second_lse, seq, rows, float("-inf"))
    highest = tl.maximum(first_rows, second_rows)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    of_first, of_second = tl.exp(first_rows - pivot), tl.exp(second_rows - pivot)
    total = of_first + of_second
    divisor = tl.where(total == 0.0, 1.0, total)
    first_tile = load_tile(first_out, seq, rows, dims).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    second_tile = load_tile(second_out, seq, rows, dims).to(tl.float32)
    tl.debug_barrier()  # threads read the same lse, each in the layout of its use: none may write before all have read
    store_tile(out, seq, rows, dims, first_tile * (of_first / divisor)[:, None] + second_tile * (of_second / divisor)[:, None])
    store_rows(lse, seq, rows, tl.where(total == 0.0, float("-inf"), pivot + tl.log(divisor)))
