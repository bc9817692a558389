"""The forward pass: out and lse by online softmax over tiles of keys."""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.dropout import kept_factor
from ..base.launch import launch
from ..base.layout import Span, load_tile, sequence, store_rows, store_tile, strided
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.place import place_queries
from ..base.rules import rules_of, scores
from ..base.softmax import softmax_finish, softmax_start, softmax_step
from ..base.tiles import launch_options, pick
from ..visits.walk import key_lists, key_range, key_step


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a canonical problem (`dmattn.problem.Problem`), with its `states` if masked."""
    heads = problem.query.shape[1]
    tile = pick("forward", problem)
    blocks = packed_blocks(problem, tile.block_m)
    launch(
        _forward_kernel,
        count_blocks(problem, blocks, tile.block_m) * heads,
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem, key_lists(problem, *tile[:2], blocks), packed_blocks=blocks),
        out=strided(out, heads),
        lse=strided(lse, heads),
        **launch_options(problem, tile, out),
    )


@triton.jit
def _forward_kernel(
    q, k, v, rules, out, lse, heads, len_q, len_k,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: out and lse of BLOCK_M queries of one (batch, head), from a grid of one axis. Walks the keys they may attend."""
    follow()
    block, head, batch = place_queries(rules, len_q, heads, BLOCK_M)
    seq = sequence(rules.ends, batch, head, len_q, len_k)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
    row_max, row_sum = softmax_start(BLOCK_M)
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    begin, end, full_end = key_range(rules, seq, rows, BLOCK_M, BLOCK_N)
    for step in tl.range(begin, end, BLOCK_N):
        start = key_step(rules, seq, rows, step, end, full_end, BLOCK_M, BLOCK_N)
        cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else seq.len_k)
        acc, row_max, row_sum = _add_tile(
            q_tile, k, v, rules, seq, acc, row_max, row_sum, rows, cols, dims, value_dims, EDGE=True, PRECISION=PRECISION
        )
    if rules.lists is not None:
        for step in tl.range(end, full_end, BLOCK_N):
            start = key_step(rules, seq, rows, step, end, full_end, BLOCK_M, BLOCK_N)
            cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None)
            acc, row_max, row_sum = _add_tile(
                q_tile, k, v, rules, seq, acc, row_max, row_sum, rows, cols, dims, value_dims, EDGE=False, PRECISION=PRECISION
            )
    acc, lse_rows = softmax_finish(acc, row_max, row_sum, rules, seq)
    store_tile(out, seq, rows, value_dims, acc)
    store_rows(lse, seq, rows, lse_rows)


@triton.jit
def _add_tile(q_tile, k, v, rules, seq, acc, row_max, row_sum, rows, cols, dims, value_dims, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of keys added to (acc, row_max, row_sum)."""
    k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
    s, _ = scores(q_tile, k_tile, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=False, PRECISION=PRECISION)
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
    if rules.seed is not None:
        p *= kept_factor(rules, seq, rows, cols, KEYS_DOWN=False)
    v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum
