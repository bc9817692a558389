"""The backward pass where dQ of a whole (batch, head) fits in registers: rows of pair representations, short text, many of them.

A program walks the keys of one (batch, head) block by block, and for each the queries, whose gradients it keeps to the end. So every tile of
scores is made once, for dQ, dK, dV and a dense dBias: five products and one exp a pair, where the kernels by blocks take seven and two.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, strided
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.query_terms import Incoming
from ..base.rules import by_query, load_bias2, rules_of, scores
from ..base.softmax import divisor2
from ..base.tiles import launch_options, pick

MOST_QUERIES = 384  # of head dim 32, whose dQ 128 threads hold in 96 registers each
PROGRAMS_PER_PROCESSOR = 2  # at least, as fewer would leave processors idle that the kernels by blocks keep busy


def row_gradients(
    problem: Problem,
    incoming: Incoming,
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
    key_sums: Tensor | None,
) -> None:
    """Fill those that are not None.

    `d_bias` (B, H, Sq, Sk) is dS itself, `key_sums` (B, H, 1, Sk) are the sums of dS over the queries.
    """
    batch, heads, len_q, _ = problem.query.shape
    tile = pick("whole rows", problem)
    launch(
        _row_gradients_kernel,
        batch * heads,
        rules=rules_of(problem),
        incoming=incoming.strided(heads),
        wanted=tuple(strided(x, heads) for x in (d_query, d_key, d_value, d_bias, vectors_of(key_sums))),
        BLOCKS_M=len_q // tile.block_m,
        **launch_options(problem, tile, incoming.d_out, d_query, d_key, d_value, d_bias),
    )


@triton.jit
def _row_gradients_kernel(
    q, k, v, rules, incoming, wanted, heads, len_q, len_k, BLOCKS_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: all queries and keys of one (batch, head), from a grid of one axis, heads fastest.

    Writes d_q, d_k, d_v, d_bias and key_sums, those that are wanted. Tuples hold a tile for each of the BLOCKS_M blocks of queries, and grow
    by `+`, as the language unpacks none.
    """
    follow()
    d_out, lse, delta = incoming
    d_q, d_k, d_v, d_bias, key_sums = wanted
    seq = Sequence(tl.program_id(0) // heads, tl.program_id(0) % heads, len_q, len_k)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None)
    row_index = tl.arange(0, BLOCK_M).to(INDEX)
    col_index = tl.arange(0, BLOCK_N).to(INDEX)
    q_tiles = ()  # [BLOCK_M, BLOCK_D]
    d_out_tiles = ()  # [BLOCK_M, BLOCK_DV]
    dqs = ()  # [BLOCK_M, BLOCK_D]
    for block in tl.static_range(BLOCKS_M):
        rows = Span(block * BLOCK_M, row_index, None)
        q_tiles = q_tiles + (load_tile(q, seq, rows, dims),)  # noqa: RUF005
        d_out_tiles = d_out_tiles + (load_tile(d_out, seq, rows, value_dims),)  # noqa: RUF005
        dqs = dqs + (tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32),)  # noqa: RUF005
    for start in tl.range(0, len_k, BLOCK_N, disable_licm=True):  # offsets of every block, kept from one turn to the next, would spill
        cols = Span(start, col_index, None)
        k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
        v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
        dk = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
        dv = tl.full([BLOCK_N, BLOCK_DV], 0.0, tl.float32)
        sums = tl.full([BLOCK_N], 0.0, tl.float32)
        further = ()
        for block in tl.static_range(BLOCKS_M):
            rows = Span(block * BLOCK_M, row_index, None)
            # Keys stand down, so that dK and dV take P and dS from registers; dQ alone takes dS through shared memory.
            addend = by_query(-divisor2(load_rows(lse, seq, rows, float("-inf"))), KEYS_DOWN=True)
            if rules.bias is not None:
                addend += load_bias2(rules, seq, rows, cols, KEYS_DOWN=True)
            s, _ = scores((q_tiles[block],), (k_tile,), rules, seq, rows, cols, EDGE=True, KEYS_DOWN=True, PRECISION=PRECISION, bias2=addend)
            p = tl.exp2(s)  # [BLOCK_N, BLOCK_M]
            d_p = tl.dot(v_tile, tl.trans(d_out_tiles[block]), input_precision=PRECISION)
            ds = p * (d_p - by_query(load_rows(delta, seq, rows, 0.0), KEYS_DOWN=True))
            if d_v is not None:
                dv = tl.dot(p.to(d_out_tiles[block].dtype), d_out_tiles[block], dv, input_precision=PRECISION)
            if d_bias is not None:
                store_tile(d_bias, seq, rows, cols, tl.trans(ds))
            if key_sums is not None:
                sums += tl.sum(ds, 1)
            d_scores = ds.to(k_tile.dtype)
            if d_k is not None:
                dk = tl.dot(d_scores, q_tiles[block], dk, input_precision=PRECISION)
            if d_q is not None:
                further = further + (tl.dot(tl.trans(d_scores), k_tile, dqs[block], input_precision=PRECISION),)  # noqa: RUF005
        if d_q is not None:
            dqs = further
        if d_k is not None:
            store_tile(d_k, seq, cols, dims, dk * rules.scale)
        if d_v is not None:
            store_tile(d_v, seq, cols, value_dims, dv)
        if key_sums is not None:
            store_rows(key_sums, seq, cols, sums)
    if d_q is not None:
        for block in tl.static_range(BLOCKS_M):
            rows = Span(block * BLOCK_M, row_index, None)
            store_tile(d_q, seq, rows, dims, dqs[block] * rules.scale)
