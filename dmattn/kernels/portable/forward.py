"""The forward pass: out and lse by online softmax over tiles of keys.

Where few blocks of queries would leave processors idle, each has several programs with a part of its keys, whose sums another kernel merges.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.dropout import kept_factor
from ..base.launch import launch
from ..base.layout import Sequence, Span, sequence, store_rows, store_tile, strided
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.pieces import load_pieces, over_rows, store_pieces, zero_pieces
from ..base.place import place_work
from ..base.rules import rules_of, scores
from ..base.softmax import sink2_of, softmax_finish, softmax_start, softmax_step
from ..base.tiles import launch_options, pick
from ..visits.walk import key_lists, key_range, walk_step, walk_steps
from .key_parts import parts_of_out, steps_of_part
from .merge import Parts, merge_splits


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a canonical problem (`dmattn.problem.Problem`), with its `states` if masked."""
    heads, sinks = problem.query.shape[1], problem.sinks
    tile = pick("forward", problem)
    blocks = packed_blocks(problem, tile.block_m)
    works = count_blocks(problem, blocks, tile.block_m) * heads
    count, parts = parts_of_out(problem, works, out), None
    if count > 1:
        parts = Parts.empty(count, out)
        problem = problem._replace(sinks=None)  # which join the sum of all parts
    launch(
        _forward_kernel,
        works * count,
        rules=rules_of(problem, key_lists(problem, *tile[:2], blocks), packed_blocks=blocks),
        out=strided(out if parts is None else parts.acc.flatten(0, 1), heads),
        lse=strided(lse if parts is None else parts.sums.flatten(0, 1), heads),
        parts=None if parts is None else count,
        **launch_options(problem, tile, out if parts is None else parts.acc.flatten(0, 1)),
    )
    if parts is not None:
        merge_splits(problem, parts, sinks, out, lse)


@triton.jit(do_not_specialize=["parts"])
def _forward_kernel(
    q, k, v, rules, out, lse, heads, len_q, len_k, parts,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: out and lse of BLOCK_M queries of one (batch, head), from a grid of one axis. Walks the keys they may attend, or of these
    one of the `parts`: out and lse are `acc` and `sums` of :class:`merge.Parts` then. Parts of the same queries are neighbours.
    """
    follow()
    program, programs, part = tl.program_id(0), tl.num_programs(0), 0
    if parts is not None:
        part, program, programs = program % parts, program // parts, programs // parts
    block, head, batch = place_work(program, programs, rules, len_q, heads, BLOCK_M, walked=tl.cdiv(len_k, 64) * (HEAD_DIM + VALUE_DIM))
    seq = sequence(rules.ends, batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM % BLOCK_D == 0 else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM % BLOCK_DV == 0 else VALUE_DIM)
    q_tiles = load_pieces(q, seq, rows, dims, (HEAD_DIM - 1) // BLOCK_D + 1)  # [BLOCK_M, BLOCK_D]
    sink2 = None
    if rules.sinks is not None:
        sink2 = sink2_of(rules.sinks, seq)  # asked for here, as nothing is done while it is waited for in the end
    row_max, row_sum = softmax_start(BLOCK_M)
    acc = zero_pieces(BLOCK_M, BLOCK_DV, (VALUE_DIM - 1) // BLOCK_DV + 1)
    begin, end, full_end = key_range(rules, seq, rows, BLOCK_M, BLOCK_N)
    own_begin, own_end = steps_of_part(begin, full_end, part, parts, BLOCK_N)
    following = walk_step(rules, seq, rows, seq.len_k, own_begin, end, full_end, BLOCK_M, BLOCK_N)
    for FULL in tl.static_range(1 if rules.lists is None else 2):  # blocks of lists of which no pair is hidden come last
        first = end if FULL else own_begin
        last = own_end if FULL else end
        if parts is not None:
            first, last = tl.maximum(own_begin, first), tl.minimum(own_end, last)
        for step in tl.range(first, last, BLOCK_N):
            start, following = walk_steps(rules, seq, rows, seq.len_k, step, following, end, full_end, BLOCK_M, BLOCK_N)
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if FULL or EVEN_N else seq.len_k)
            acc, row_max, row_sum = _add_tile(
                q_tiles, k, v, rules, seq, acc, row_max, row_sum, rows, cols, dims, value_dims, EDGE=not FULL, PRECISION=PRECISION
            )
    if parts is not None:
        of_part = Sequence(part * (programs // (tl.cdiv(len_q, BLOCK_M) * heads)) + batch, head, len_q, len_k)
        store_tile(lse, of_part, rows, Span(0, tl.arange(0, 2), None), tl.join(row_max, row_sum))
        store_pieces(out, of_part, rows, value_dims, acc)
    else:
        out_tiles = ()
        for piece in tl.static_range(len(acc)):
            out_tile, lse_rows = softmax_finish(acc[piece], row_max, row_sum, sink2)
            out_tiles = out_tiles + (out_tile,)  # noqa: RUF005
        store_pieces(out, seq, rows, value_dims, out_tiles)
        store_rows(lse, seq, rows, lse_rows)


@triton.jit
def _add_tile(q_tiles, k, v, rules, seq, acc, row_max, row_sum, rows, cols, dims, value_dims, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of keys added to (acc, row_max, row_sum)."""
    k_tiles = load_pieces(k, seq, cols, dims, len(q_tiles))  # [BLOCK_N, BLOCK_D]
    s, _ = scores(q_tiles, k_tiles, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=False, PRECISION=PRECISION)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
    if rules.seed is not None:
        p *= kept_factor(rules, seq, rows, cols, KEYS_DOWN=False)
    v_tiles = load_pieces(v, seq, cols, value_dims, len(acc))  # [BLOCK_N, BLOCK_DV]
    acc = over_rows(p, v_tiles, acc, PRECISION, alpha[:, None])
    return acc, row_max, row_sum
