"""The gradient of sinks, each head's score that all queries see: a sum over the terms of queries (base/query_terms.py)."""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.described import Packed
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Sequence, Span, ends_of, load_rows, sequence, store_tile, strided, strided_by_head
from ..base.overlap import follow
from ..base.parts import empty_parts, even_parts, sum_parts
from ..base.query_terms import Incoming, terms_of_columns
from ..base.rules import LOG2E
from ..base.softmax import divisor2, sink2_of

QUERIES = 8192  # of a turn, at most
WORTH = 2  # turns of a program that are worth another beside it, whose sum a further kernel adds
PROGRAMS_PER_PROCESSOR = 2


def gradients_by_query(sinks: Tensor, incoming: Incoming) -> Tensor:
    """(B, H, Sq): of the sink's score in the row of each query, -exp(sink - lse) * delta. Of packed sequences (1, H, Sq in whole blocks)."""
    terms = incoming.vectors if isinstance(incoming.lse, Packed) else incoming.vectors[..., : incoming.lse.shape[2]]
    divisor, delta = terms.unbind(2)
    return ((sinks[:, None].float() * LOG2E.value) - divisor).exp2_().mul_(delta).neg_()


def sink_gradients(problem: Problem, incoming: Incoming, sinks: Tensor, d_sinks: Tensor) -> None:
    """Fill `d_sinks` (H,) with the sums of -exp(sink - lse) * delta over all queries of a head."""
    batch, heads, len_q = incoming.lse.shape
    block = min(QUERIES, triton.next_power_of_2(max(len_q, 16)))
    blocks = triton.cdiv(len_q, block)
    programs = min(PROGRAMS_PER_PROCESSOR * processors(d_sinks.device), heads * batch * blocks // WORTH)
    splits = even_parts(batch * blocks, programs // heads)
    total = d_sinks[None, :, None, None]
    parts = empty_parts(total, splits)
    launch(
        _sink_gradients_kernel,
        heads * splits,
        incoming=incoming.for_sinks(heads),
        scale=problem.scale,
        sinks=strided_by_head(sinks),
        ends=ends_of(problem),
        parts=strided(parts, heads),
        members=batch * blocks,
        members_per_part=triton.cdiv(batch * blocks, splits),
        heads=heads,
        blocks=blocks,
        len_q=len_q,
        BLOCK=block,
        num_warps=max(1, min(16, block // 128)),
        enable_fp_fusion=False,  # a sink and the lse that equals it are to be equal times LOG2E, too, however large
    )
    sum_parts(parts, total)


@triton.jit
def _sink_gradients_kernel(incoming, scale, sinks, ends, parts, members, members_per_part, heads, blocks, len_q, BLOCK: tl.constexpr):
    """One program: the sum of its share of the blocks of queries of one head, those of all batch entries.

    Grid of one axis: heads fastest, then shares.
    """
    follow()
    lse, delta, columns = incoming
    head = tl.program_id(0) % heads
    part = tl.program_id(0) // heads
    begin = part * members_per_part
    sink2 = sink2_of(sinks, Sequence(0, head, len_q, 0))
    total = tl.full([BLOCK], 0.0, tl.float32)
    for member in tl.range(begin, tl.minimum(begin + members_per_part, members)):
        seq = sequence(ends, member // blocks, head, len_q, 0)
        rows = Span(member % blocks * BLOCK, tl.arange(0, BLOCK).to(tl.int64), seq.len_q)
        if columns is None:
            p = tl.exp2(sink2 - divisor2(load_rows(lse, seq, rows, float("-inf"))))
            total -= p * load_rows(delta, seq, rows, 0.0)
        else:
            lowered_score, lowered = terms_of_columns(columns, seq, rows, scale)
            # Probabilities are 1 at most. What stands for one past the end is made finite, as it meets a 0 there.
            total += tl.exp2(tl.minimum(sink2 + lowered_score, 127.0)) * lowered
    one = Span(0, tl.arange(0, 1), None)
    store_tile(parts, Sequence(part, head, len_q, 0), one, one, tl.sum(total, 0) + tl.full([1, 1], 0.0, tl.float32))
