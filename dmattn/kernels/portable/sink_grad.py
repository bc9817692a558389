"""The gradient of sinks, each head's score that all queries see: what was summed beside their terms (base/query_terms.py)."""

import triton
import triton.language as tl
from torch import Tensor

from ..base.described import Packed
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, store_tile, strided
from ..base.overlap import follow
from ..base.query_terms import Incoming
from ..base.rules import LOG2E
from .bias_grad import Sharing

SUMS = 2048  # of a turn
WORTH = 2  # turns of a program that are worth another beside it, whose sum a further kernel adds
PROGRAMS_PER_PROCESSOR = 2


def gradients_by_query(sinks: Tensor, incoming: Incoming) -> Tensor:
    """(B, H, Sq): of the sink's score in the row of each query. Of packed sequences (1, H, Sq in whole blocks)."""
    terms = incoming.vectors if isinstance(incoming.lse, Packed) else incoming.vectors[..., : incoming.lse.shape[2]]
    divisor, delta = terms.unbind(2)
    return ((sinks[:, None].float() * LOG2E.value) - divisor).exp2_().mul_(delta).neg_()


def sink_gradients(sink_sums: Tensor, d_sinks: Tensor) -> None:
    """Fill `d_sinks` (H,) with the sums over all of a head in (B, H, sums)."""
    batch, heads, sums = sink_sums.shape
    blocks = triton.cdiv(sums, SUMS)
    programs = min(PROGRAMS_PER_PROCESSOR * processors(d_sinks.device), heads * batch * blocks // WORTH)
    sharing = Sharing.of_blocks(heads, batch * blocks, programs)
    total = d_sinks[None, :, None, None]
    parts = sharing.parts(total)
    launch(
        _sink_gradients_kernel,
        heads * sharing.splits,
        sink_sums=strided(sink_sums, heads),
        parts=strided(parts, heads),
        sharing=sharing.argument,
        heads=heads,
        blocks=blocks,
        sums=sums,
        BLOCK=SUMS,
        num_warps=8,
    )
    sharing.sum_parts(parts, total)


@triton.jit
def _sink_gradients_kernel(sink_sums, parts, sharing, heads, blocks, sums, BLOCK: tl.constexpr):
    """One program: the sum of its share of the blocks of sums of one head, those of all batch entries.

    Grid of one axis: heads fastest, then shares.
    """
    follow()
    _slices, _sharing_heads, members, members_per_part = sharing
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    begin = part * members_per_part
    total = tl.full([BLOCK], 0.0, tl.float32)
    for member in tl.range(begin, tl.minimum(begin + members_per_part, members)):
        seq = Sequence(member // blocks, head, sums, 0)
        total += load_rows(sink_sums, seq, Span(member % blocks * BLOCK, tl.arange(0, BLOCK).to(tl.int64), sums), 0.0)
    one = Span(0, tl.arange(0, 1), None)
    store_tile(parts, Sequence(part, head, sums, 0), one, one, tl.sum(total, 0) + tl.full([1, 1], 0.0, tl.float32))
