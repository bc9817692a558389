"""dK and dV, and the per-key dBias as column sums: a program owns a block of keys and walks the queries that may attend them."""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.key_sums import by_group, vectors_of
from ..base.launch import launch
from ..base.layout import Span, load_rows, load_tile, sequence, store_pairs, store_rows, store_tile, store_zeros, strided, under_head
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.place import LARGEST, place_keys
from ..base.query_terms import Incoming
from ..base.rules import rules_of, through_softcap
from ..base.softmax import score_gradient
from ..base.tiles import launch_options, pick
from ..visits.walk import query_lists, query_range, query_step


def key_gradients(
    problem: Problem,
    incoming: Incoming,
    d_key: Tensor | None,
    d_value: Tensor | None,
    key_sums: Tensor | None,
    d_bias: Tensor | None,
    order: Tensor | None,
) -> None:
    """Fill those that are not None.

    `key_sums` are the sums of dS over the queries, (B, H, 1, Sk), or (B, Hk, 1, Sk) those over the queries of a group of heads; `d_bias`
    (B, H, Sq, Sk) is dS itself, every element of which is written. Where the problem's keys are copies in an `order` (B, Hk, listed), with
    intervals and without `d_bias`, it says for each where its gradients and its sums belong; other places are left as they are.
    """
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    tile = pick("keys", problem)
    blocks = packed_blocks(problem, tile.block_n, by_key=True)
    lists = query_lists(problem, *tile[:2], blocks)
    if d_bias is not None and (lists is not None or problem.first is not None or problem.ends_q is not None):
        d_bias.zero_()  # what no list names, or lies outside the intervals, or beyond the lengths of packed sequences
    sums = vectors_of(key_sums)
    launch(
        _key_gradients_kernel,
        count_blocks(problem, blocks, tile.block_n, by_key=True) * kv_heads,
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem, lists, packed_blocks=blocks),
        incoming=incoming.strided(heads),
        wanted=tuple(strided(x, heads) for x in (d_key, d_value, sums, d_bias)),
        order=strided(order, heads),
        groups=heads // kv_heads,
        BY_GROUP=by_group(problem, key_sums),
        **launch_options(problem, tile, incoming.d_out, d_key, d_value, d_bias),
    )


@triton.jit
def _key_gradients_kernel(
    q, k, v, rules, incoming, wanted, order, groups, heads, len_q, len_k, BY_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and their queries.

    What it stores for each key it stores where the keys lie, or where `order` says. Sums over the queries are those of a head, or BY_GROUP.
    """
    follow()
    block, kv_head, batch = place_keys(rules, len_k, heads // groups, BLOCK_N)
    cols = Span(block * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    first_seq = sequence(rules.ends, batch, kv_head * groups, len_q, len_k)
    if rules.ends is not None:
        cols = Span(cols.start, cols.index, first_seq.len_k)
    k_tile = load_tile(k, first_seq, cols, dims)  # [BLOCK_N, BLOCK_D]
    v_tile = load_tile(v, first_seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
    places = cols
    if order is not None:
        places = Span(0, load_rows(order, first_seq, cols, LARGEST).to(tl.int64), LARGEST)
    dk = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    dv = tl.full([BLOCK_N, BLOCK_DV], 0.0, tl.float32)
    d_k, d_v, key_sums, d_bias = wanted
    d_out, lse, delta = incoming
    incoming = (q, d_out, lse, delta)
    wanted = (d_k, d_v, key_sums, d_bias)
    sums = tl.full([BLOCK_N], 0.0, tl.float32)
    for head in tl.range(kv_head * groups, (kv_head + 1) * groups):
        seq = under_head(first_seq, head)
        if not BY_GROUP:
            sums = tl.full([BLOCK_N], 0.0, tl.float32)
        begin, end, full_end = query_range(rules, seq, cols, BLOCK_M, BLOCK_N)
        for step in tl.range(begin, end, BLOCK_M):
            start = query_step(rules, seq, cols, step, end, full_end, BLOCK_M, BLOCK_N)
            rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
            dk, dv, sums = _add_tile(
                incoming, k_tile, v_tile, rules, seq, wanted, dk, dv, sums, rows, cols, dims, value_dims, EDGE=True, PRECISION=PRECISION
            )
        if rules.lists is not None:
            for step in tl.range(end, full_end, BLOCK_M):
                start = query_step(rules, seq, cols, step, end, full_end, BLOCK_M, BLOCK_N)
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
                dk, dv, sums = _add_tile(
                    incoming, k_tile, v_tile, rules, seq, wanted, dk, dv, sums, rows, cols, dims, value_dims, EDGE=False, PRECISION=PRECISION
                )
        if rules.lists is None and rules.first is None and rules.ends is None:
            for start in tl.range(0, begin, BLOCK_M):
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), len_q)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
            for start in tl.range(begin + tl.cdiv(end - begin, BLOCK_M) * BLOCK_M, len_q, BLOCK_M):
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), len_q)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
        if key_sums is not None and not BY_GROUP:
            store_rows(key_sums, seq, places, sums)
    if key_sums is not None and BY_GROUP:
        store_rows(key_sums, first_seq, places, sums)
    if d_k is not None:
        store_tile(d_k, first_seq, places, dims, dk * rules.scale)
    if d_v is not None:
        store_tile(d_v, first_seq, places, value_dims, dv)


@triton.jit
def _add_tile(
    incoming, k_tile, v_tile, rules, seq, wanted, dk, dv, sums, rows, cols, dims, value_dims, EDGE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One tile of queries added to (dk, dv, sums), each only if it is wanted."""
    q, d_out, lse, delta = incoming
    d_k, d_v, key_sums, d_bias = wanted
    q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
    d_out_tile = load_tile(d_out, seq, rows, value_dims)  # [BLOCK_M, BLOCK_DV]
    lse_rows = load_rows(lse, seq, rows, float("-inf"))
    delta_rows = load_rows(delta, seq, rows, 0.0)
    p, ds, tanh = score_gradient(
        q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=True, PRECISION=PRECISION
    )
    if d_v is not None:
        dv = tl.dot(p.to(d_out_tile.dtype), d_out_tile, dv, input_precision=PRECISION)
    if key_sums is not None:
        sums += tl.sum(ds, 1)
    if d_bias is not None:
        store_pairs(d_bias, seq, rows, cols, tl.trans(ds))
    if d_k is not None:
        dk = tl.dot(through_softcap(ds, tanh, rules).to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv, sums
