"""dQ, and the dBias of a bias that no two (batch, head) share: a program owns a block of queries and walks the keys they may attend.

Where few blocks would leave processors idle, each has several programs with a part of the keys, and a second kernel adds their dQ in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.distances import inner_steps, outer_places
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_pairs, sequence, store_pairs, store_rows, store_zeros, strided
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.parts import empty_parts, sum_parts
from ..base.pieces import load_again, load_pieces, over_rows, store_pieces, times, zero_pieces
from ..base.place import place_work
from ..base.query_terms import Given, Incoming, terms_of
from ..base.rules import LANES, add_at_ends, add_at_one_end, load_ends2, place_of_first, rules_of, through_softcap
from ..base.softmax import divisor2, score_gradient
from ..base.tiles import launch_options, pick
from ..base.window import next_step
from ..visits.walk import key_lists, key_range, walk_step, walk_steps
from .key_parts import parts_of_queries, steps_of_part


def query_gradients(
    problem: Problem, incoming: Incoming, given: Given | None, d_query: Tensor | None, d_bias: Tensor | None, end_sums: Tensor | None = None
) -> None:
    """Fill those that are not None; every element of `d_bias` (B, H, Sq, Sk) is written.

    The terms of queries are made too, if they are `given` O. If they are not given, `d_bias` holds dS already: it is read, and dQ is its
    product with the keys. `end_sums` (2, B, H, Sq) are the sums of dS over the keys that take the first number of a table of distances, and the
    last, if another.
    """
    holds_ds = given is None
    heads = problem.query.shape[1]
    tile = pick("queries of d_bias" if holds_ds else "queries", problem)
    blocks = packed_blocks(problem, tile.block_m)
    works = count_blocks(problem, blocks, tile.block_m) * heads
    count = 1 if end_sums is not None else parts_of_queries(problem, works, d_query)
    d_q = d_query if count == 1 else empty_parts(d_query, count)
    lists = key_lists(problem, *tile[:2], blocks)
    if d_bias is not None and (lists is not None or problem.ends_q is not None) and not holds_ds:
        d_bias.zero_()  # the blocks of keys that no list names, and what lies beyond the lengths of packed sequences
    options = launch_options(problem, tile, incoming.d_out, d_q, d_bias)
    if holds_ds:
        options["v"] = None
    launch(
        _query_gradients_kernel,
        works * count,
        rules=rules_of(problem, lists, packed_blocks=blocks),
        d_out=strided(incoming.d_out, heads),
        given=given,
        stored=None if holds_ds else incoming.stored(problem),
        d_q=strided(d_q, heads),
        d_bias=strided(d_bias, heads),
        end_sums=None if end_sums is None else (strided(end_sums[0], heads), strided(end_sums[1], heads)),
        parts=None if count == 1 else count,
        **options,
    )
    if count > 1:
        sum_parts(d_q, d_query)


@triton.jit(do_not_specialize=["parts"])
def _query_gradients_kernel(
    q, k, v, rules, d_out, given, stored, d_q, d_bias, end_sums, heads, len_q, len_k, parts,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one (batch, head), from a grid of one axis, and all of their keys or one of the parts. Writes dQ, and dS
    as rows of dBias; no V is given where dS is made already. Of a table of distances it writes the sums at its ends.

    Parts of the same queries are neighbours. Their dQ lie one behind the other on the batch axis.
    """
    follow()
    DS_IS_MADE: tl.constexpr = v is None
    program, programs, part = tl.program_id(0), tl.num_programs(0), 0
    if parts is not None:
        part, program, programs = program % parts, program // parts, programs // parts
    block, head, batch = place_work(program, programs, rules, len_q, heads, BLOCK_M, walked=tl.cdiv(len_k, 64) * (HEAD_DIM + VALUE_DIM))
    seq = sequence(rules.ends, batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM % BLOCK_D == 0 else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM % BLOCK_DV == 0 else VALUE_DIM)
    q_tiles = load_pieces(q, seq, rows, dims, (HEAD_DIM - 1) // BLOCK_D + 1)  # [BLOCK_M, BLOCK_D]
    d_out_tiles = load_pieces(d_out, seq, rows, value_dims, (VALUE_DIM - 1) // BLOCK_DV + 1)  # [BLOCK_M, BLOCK_DV]
    stats = None
    if not DS_IS_MADE:
        stats = terms_of(given, stored, d_out_tiles, seq, rows, value_dims)
    dq = zero_pieces(BLOCK_M, BLOCK_D, len(q_tiles))
    ends = (tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], 0.0, tl.float32))
    held = (q_tiles, d_out_tiles, (k, v, d_q, d_bias, end_sums), rules, seq, rows, dims, value_dims)
    begin, end, full_end = key_range(rules, seq, rows, BLOCK_M, BLOCK_N)
    if rules.table is not None and rules.lists is None and not DS_IS_MADE:
        # Outer tiles, of keys before the queries and after, whose pairs have one number for their bias; then inner ones.
        first2, last2 = load_ends2(rules, seq)
        low, high = outer_places(rules.distances, first2, last2, BLOCK_M, BLOCK_N)
        place = place_of_first(rules, seq, rows.start, 0)
        end = next_step(begin, end, BLOCK_N)
        inner_begin, inner_end = inner_steps(begin, end, low + 1 - place, high - place, BLOCK_N)
        lowered2 = -divisor2(stats[0])
        lanes = (tl.full([BLOCK_M, LANES], 0.0, tl.float32), tl.full([BLOCK_M, LANES], 0.0, tl.float32))
        for step in tl.range(begin, end - (inner_end - inner_begin), BLOCK_N):
            before = step < inner_begin
            start = step + tl.where(before, 0, inner_end - inner_begin)
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else seq.len_k)
            dq, lanes = _add_tile(
                *held, (None, stats[1]), dq, lanes, cols, EDGE=True, DS_IS_MADE=False, PRECISION=PRECISION,
                before=before, bias2=(lowered2 + tl.where(before, first2, last2))[:, None],
            )  # fmt: skip
        ends = (tl.sum(lanes[0], 1), tl.sum(lanes[1], 1))
        for start in tl.range(inner_begin, inner_end, BLOCK_N):
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else seq.len_k)
            dq, ends = _add_tile(*held, stats, dq, ends, cols, EDGE=True, DS_IS_MADE=False, PRECISION=PRECISION)
        end = begin
    own_begin, own_end = steps_of_part(begin, full_end, part, parts, BLOCK_N)
    following = walk_step(rules, seq, rows, seq.len_k, own_begin, end, full_end, BLOCK_M, BLOCK_N)
    for step in tl.range(own_begin, end if parts is None else tl.minimum(own_end, end), BLOCK_N):
        start, following = walk_steps(rules, seq, rows, seq.len_k, step, following, end, full_end, BLOCK_M, BLOCK_N)
        cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else seq.len_k)
        dq, ends = _add_tile(*held, stats, dq, ends, cols, EDGE=True, DS_IS_MADE=DS_IS_MADE, PRECISION=PRECISION)
    if rules.lists is not None:
        for step in tl.range(end if parts is None else tl.maximum(own_begin, end), own_end, BLOCK_N):
            start, following = walk_steps(rules, seq, rows, seq.len_k, step, following, end, full_end, BLOCK_M, BLOCK_N)
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None)
            dq, ends = _add_tile(*held, stats, dq, ends, cols, EDGE=False, DS_IS_MADE=DS_IS_MADE, PRECISION=PRECISION)
    if rules.lists is None and rules.ends is None and not DS_IS_MADE:  # noqa: SIM102 - as in window.py
        if part == 0:
            for start in tl.range(0, begin, BLOCK_N):
                cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), len_k)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
            for start in tl.range(begin + tl.cdiv(end - begin, BLOCK_N) * BLOCK_N, len_k, BLOCK_N):
                cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), len_k)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
    if d_q is not None:
        place = seq
        if parts is not None:
            place = Sequence(part * (programs // (tl.cdiv(len_q, BLOCK_M) * heads)) + batch, head, len_q, len_k)
        store_pieces(d_q, place, rows, dims, times(dq, rules.scale))
    if end_sums is not None:
        store_rows(end_sums[0], seq, rows, ends[0])
        store_rows(end_sums[1], seq, rows, ends[1])


@triton.jit
def _add_tile(
    q_tiles, d_out_tiles, tensors, rules, seq, rows, dims, value_dims, stats, dq, ends, cols,
    EDGE: tl.constexpr, DS_IS_MADE: tl.constexpr, PRECISION: tl.constexpr, before=None, bias2=None,
):  # fmt: skip
    """One tile of keys added to (dq, ends), each only if it is wanted: dS, stored if dBias is wanted or read where DS_IS_MADE already.

    In an outer tile beside a table of distances, of keys `before` the queries or after, `ends` are by lane, and `bias2` is less lse, which
    `stats` lack.
    """
    k, v, d_q, d_bias, end_sums = tensors
    k_tiles = load_pieces(k, seq, cols, dims, len(q_tiles))  # [BLOCK_N, BLOCK_D]
    if DS_IS_MADE:
        dq = over_rows(load_pairs(d_bias, seq, rows, cols), k_tiles, dq, PRECISION)
    else:
        lse_rows, delta_rows = stats
        v_tiles = load_pieces(v, seq, cols, value_dims, len(d_out_tiles))  # [BLOCK_N, BLOCK_DV]
        scored = (q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, delta_rows, rules, seq, rows, cols)
        _, ds, tanh = score_gradient(*scored, EDGE=EDGE, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2)
        if d_bias is not None:
            store_pairs(d_bias, seq, rows, cols, ds)
        if d_q is not None:
            dq = over_rows(through_softcap(ds, tanh, rules), load_again(k_tiles, k, seq, cols, dims), dq, PRECISION)
        if end_sums is not None:
            if before is None:
                ends = add_at_ends(ds, ends, rules, seq, rows, cols)
            else:
                ends = add_at_one_end(ds, ends, before)
    return dq, ends
