"""dQ, and the dBias of a bias that no two (batch, head) share: a program owns a block of queries and walks the keys they may attend."""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, store_zeros, strided
from ..base.overlap import follow
from ..base.place import place_queries
from ..base.query_terms import Incoming
from ..base.rules import add_at_ends, rules_of, through_softcap
from ..base.softmax import score_gradient
from ..base.tiles import launch_options, pick
from ..visits.walk import key_lists, key_range, key_step


def query_gradients(
    problem: Problem, incoming: Incoming, d_query: Tensor | None, d_bias: Tensor | None, end_sums: Tensor | None = None, stored: bool = False
) -> None:
    """Fill those that are not None; `d_bias` is (B, H, Sq, Sk), every element of which is written.

    `end_sums` (2, B, H, Sq) are the sums of dS over the keys that take the first number of a table of distances, and the last, if another.
    With `stored` `d_bias` holds dS already: it is read, and dQ is its product with the keys.
    """
    batch, heads, len_q, _ = problem.query.shape
    tile = pick("queries of d_bias" if stored else "queries", problem)
    lists = key_lists(problem, *tile[:2])
    if d_bias is not None and lists is not None and not stored:
        d_bias.zero_()  # the blocks of keys that no list names
    d_out, lse, delta = incoming.strided(heads)
    launch(
        _query_gradients_kernel,
        triton.cdiv(len_q, tile.block_m) * heads * batch,
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem, lists),
        d_out=d_out,
        lse=lse,
        delta=delta,
        d_q=strided(d_query, heads),
        d_bias=strided(d_bias, heads),
        end_sums=None if end_sums is None else (strided(end_sums[0], heads), strided(end_sums[1], heads)),
        STORED=stored,
        **launch_options(problem, tile, incoming.d_out, d_query, d_bias),
    )


@triton.jit
def _query_gradients_kernel(
    q, k, v, rules, d_out, lse, delta, d_q, d_bias, end_sums, heads, len_q, len_k, STORED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one (batch, head), from a grid of one axis. Writes dQ, and dS as their rows of dBias if not STORED.

    Of a table of distances it writes the sums at its ends.
    """
    follow()
    block, head, batch = place_queries(rules, len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
    d_out_tile = load_tile(d_out, seq, rows, value_dims)  # [BLOCK_M, BLOCK_DV]
    stats = (load_rows(lse, seq, rows, float("-inf")), load_rows(delta, seq, rows, 0.0))
    dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    ends = (tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], 0.0, tl.float32))
    tensors = (k, v, d_q, d_bias, end_sums)
    begin, end, full_end = key_range(rules, seq, rows, BLOCK_M, BLOCK_N)
    for step in tl.range(begin, end, BLOCK_N):
        start = key_step(rules, seq, rows, step, end, full_end, BLOCK_M, BLOCK_N)
        cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
        dq, ends = _add_tile(
            q_tile,
            d_out_tile,
            stats,
            tensors,
            rules,
            seq,
            dq,
            ends,
            rows,
            cols,
            dims,
            value_dims,
            EDGE=True,
            STORED=STORED,
            PRECISION=PRECISION,
        )
    if rules.lists is not None:
        for step in tl.range(end, full_end, BLOCK_N):
            start = key_step(rules, seq, rows, step, end, full_end, BLOCK_M, BLOCK_N)
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None)
            dq, ends = _add_tile(
                q_tile,
                d_out_tile,
                stats,
                tensors,
                rules,
                seq,
                dq,
                ends,
                rows,
                cols,
                dims,
                value_dims,
                EDGE=False,
                STORED=STORED,
                PRECISION=PRECISION,
            )
    if rules.lists is None and not STORED:
        for start in tl.range(0, begin, BLOCK_N):
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), len_k)
            store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
        for start in tl.range(begin + tl.cdiv(end - begin, BLOCK_N) * BLOCK_N, len_k, BLOCK_N):
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), len_k)
            store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
    if d_q is not None:
        store_tile(d_q, seq, rows, dims, dq * rules.scale)
    if end_sums is not None:
        store_rows(end_sums[0], seq, rows, ends[0])
        store_rows(end_sums[1], seq, rows, ends[1])


@triton.jit
def _add_tile(
    q_tile, d_out_tile, stats, tensors, rules, seq, dq, ends, rows, cols, dims, value_dims,
    EDGE: tl.constexpr, STORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to (dq, ends), each only if it is wanted: dS, stored if dBias is wanted or read where it is STORED already."""
    k, v, d_q, d_bias, end_sums = tensors
    k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
    if STORED:
        dq = tl.dot(load_tile(d_bias, seq, rows, cols).to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    else:
        lse_rows, delta_rows = stats
        v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
        _, ds, tanh = score_gradient(
            q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=False, PRECISION=PRECISION
        )
        if d_bias is not None:
            store_tile(d_bias, seq, rows, cols, ds)
        if d_q is not None:
            dq = tl.dot(through_softcap(ds, tanh, rules).to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        if end_sums is not None:
            ends = add_at_ends(ds, ends, rules, seq, rows, cols)
    return dq, ends
