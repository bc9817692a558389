"""The gradient of sinks, each head's score that all queries see: the sum over them of what is made with their terms (base/query_terms.py)."""

import triton
import triton.language as tl
from torch import Tensor

from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, store_tile, strided
from ..base.overlap import follow
from .bias_grad import Sharing

QUERIES = 8192  # of a turn
WORTH = 2  # turns of a program that are worth another beside it, whose sum a further kernel adds
PROGRAMS_PER_PROCESSOR = 2


def sink_gradients(sink_terms: Tensor, d_sinks: Tensor) -> None:
    """Fill `d_sinks` (H,) with the sums of sink terms (B, H, rows) over all rows of a head."""
    batch, heads, rows = sink_terms.shape
    blocks = triton.cdiv(rows, QUERIES)
    programs = min(PROGRAMS_PER_PROCESSOR * processors(d_sinks.device), heads * batch * blocks // WORTH)
    sharing = Sharing.of_blocks(heads, batch * blocks, programs)
    total = d_sinks[None, :, None, None]
    parts = sharing.parts(total)
    launch(
        _sink_gradients_kernel,
        heads * sharing.splits,
        sink_terms=strided(sink_terms, heads),
        parts=strided(parts, heads),
        sharing=sharing.argument,
        heads=heads,
        blocks=blocks,
        rows=rows,
        BLOCK=QUERIES,
        num_warps=16,
    )
    sharing.sum_parts(parts, total)


@triton.jit
def _sink_gradients_kernel(sink_terms, parts, sharing, heads, blocks, rows, BLOCK: tl.constexpr):
    """One program: the sum of its share of the blocks of rows of one head, those of all batch entries.

    Grid of one axis: heads fastest, then shares.
    """
    follow()
    _slices, _sharing_heads, members, members_per_part = sharing
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    begin = part * members_per_part
    total = tl.full([BLOCK], 0.0, tl.float32)
    for member in tl.range(begin, tl.minimum(begin + members_per_part, members)):
        seq = Sequence(member // blocks, head, rows, 0)
        total += load_rows(sink_terms, seq, Span(member % blocks * BLOCK, tl.arange(0, BLOCK).to(tl.int64), rows), 0.0)
    one = Span(0, tl.arange(0, 1), None)
    store_tile(parts, Sequence(part, head, rows, 0), one, one, tl.sum(total, 0) + tl.full([1, 1], 0.0, tl.float32))
