"""The gradient of sinks: of each head's score that all queries see, summed over them. It is made of their terms, without a look at any pair."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.described import Packed
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, ends_of, load_rows, sequence, store_tile, strided, strided_by_head
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.place import listed_block
from ..base.query_terms import Incoming, load_delta
from ..base.rules import LOG2E
from ..base.softmax import divisor2, sink2_of
from .bias_grad import Sharing

QUERIES, PACKED_QUERIES = 8192, 1024  # of a turn; of packed sequences, of which each has turns of its own
WORTH = 2  # turns of a program that are worth another beside it, whose sum a further kernel adds
PROGRAMS_PER_PROCESSOR = 2


def gradients_by_query(sinks: Tensor, incoming: Incoming) -> Tensor:
    """(B, H, Sq): of the sink's score in the row of each query, which is -p * delta with p = exp(sink - lse).

    Of packed sequences (1, H, Sq in whole blocks), see `layout.first_row_in_blocks`.
    """
    terms = incoming.vectors if isinstance(incoming.lse, Packed) else incoming.vectors[..., : incoming.lse.shape[2]]
    divisor, delta = terms.unbind(2)
    return torch.exp2((sinks[:, None].float() * LOG2E.value) - divisor) * -delta


def sink_gradients(problem: Problem, sinks: Tensor, incoming: Incoming, d_sinks: Tensor) -> None:
    """Fill `d_sinks` (H,) with the sums of these over all queries of a head."""
    heads, len_q = incoming.lse.shape[1:]
    queries = QUERIES if problem.ends_q is None else PACKED_QUERIES
    packed = packed_blocks(problem, queries)
    blocks = count_blocks(problem, packed, queries)
    sharing = Sharing.of_blocks(heads, blocks, min(PROGRAMS_PER_PROCESSOR * processors(d_sinks.device), heads * blocks // WORTH))
    total = d_sinks[None, :, None, None]
    parts = sharing.parts(total)
    _d_out, lse, delta = incoming.strided(heads)
    launch(
        _sink_gradients_kernel,
        heads * sharing.splits,
        sinks=strided_by_head(sinks),
        lse=lse,
        delta=delta,
        ends=ends_of(problem),
        packed_blocks=packed,
        parts=strided(parts, heads),
        sharing=sharing.argument,
        heads=heads,
        blocks=triton.cdiv(len_q, queries),
        len_q=len_q,
        BLOCK=queries,
        num_warps=16 if problem.ends_q is None else 4,
        enable_fp_fusion=False,  # as for delta (base/query_terms.py): lanes that share a sum are to get the same one
    )
    sharing.sum_parts(parts, total)


@triton.jit
def _sink_gradients_kernel(sinks, lse, delta, ends, packed_blocks, parts, sharing, heads, blocks, len_q, BLOCK: tl.constexpr):
    """One program: the sum of -p * delta over its share of the blocks of queries of one head, those of all batch entries.

    Grid of one axis: heads fastest, then shares.
    """
    follow()
    _slices, _sharing_heads, members, members_per_part = sharing
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    begin = part * members_per_part
    sink2 = sink2_of(sinks, Sequence(0, head, len_q, 0))
    total = tl.full([BLOCK], 0.0, tl.float32)
    for member in tl.range(begin, tl.minimum(begin + members_per_part, members)):
        if packed_blocks is None:
            block, batch = member % blocks, member // blocks
        else:
            block, batch = listed_block(packed_blocks, member)
        seq = sequence(ends, batch, head, len_q, 0)
        rows = Span(block * BLOCK, tl.arange(0, BLOCK).to(tl.int64), seq.len_q)
        p = tl.exp2(sink2 - divisor2(load_rows(lse, seq, rows, float("-inf"))))
        total -= p * load_delta(delta, seq, rows)
    one = Span(0, tl.arange(0, 1), None)
    store_tile(parts, Sequence(part, head, len_q, 0), one, one, tl.sum(total, 0) + tl.full([1, 1], 0.0, tl.float32))
