"""dK and dV, and the per-key dBias as column sums: a program owns a block of keys and walks the queries that may attend them."""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.device import processors
from ..base.launch import launch
from ..base.layout import Span, load_pairs, load_rows, sequence, store_pairs, store_rows, store_zeros, strided, under_head
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.packed_blocks import count_blocks, packed_blocks
from ..base.pieces import load_again, load_pieces, over_rows, store_pieces, times, zero_pieces
from ..base.place import LARGEST, place_keys
from ..base.query_terms import Incoming
from ..base.rules import rules_of, through_softcap
from ..base.softmax import score_gradient
from ..base.tiles import in_pieces, launch_options, pick, pick_storing
from ..visits.walk import query_lists, query_range, walk_step, walk_steps
from .group_parts import GroupParts, count_query_parts, heads_of_part, numbers_of, part_of_group, split_of, under_part, under_split
from .key_parts import steps_of_part

PROGRAMS_PER_PROCESSOR = 2


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
    tile = pick("keys", problem) if d_bias is None else pick_storing(problem)
    blocks = packed_blocks(problem, tile.block_n, by_key=True)
    lists = query_lists(problem, *tile[:2], blocks)
    if d_bias is not None and (lists is not None or problem.first is not None or problem.ends_q is not None):
        d_bias.zero_()  # what no list names, or lies outside the intervals, or beyond the lengths of packed sequences
    fill = fill_of(problem)
    splits = count_query_parts(problem, *fill, key_sums, order)
    parts = GroupParts(problem, *fill, (d_key, d_value, key_sums), order, splits)
    sums = vectors_of(parts.key_sums)
    wanted = ((parts.d_key, parts.d_value, sums, d_bias),)
    if in_pieces(problem, tile):  # sums for both dK and dV would not fit the registers beside products in pieces
        in_first = (None, None) if d_bias is None else (sums, d_bias)
        in_second = (sums, None) if d_bias is None else (None, d_bias)
        wanted = ((None, parts.d_value, *in_first), (parts.d_key, None, *in_second))
    options = launch_options(problem, tile, incoming.d_out, parts.d_key, parts.d_value, d_bias)
    for number, group in enumerate(wanted):
        ds_is_made = number > 0 and d_bias is not None
        if all(x is None for x in (group[:3] if ds_is_made else group)):
            continue
        launch(
            _key_gradients_kernel,
            count_blocks(problem, blocks, tile.block_n, by_key=True) * kv_heads * parts.count,
            rules=rules_of(problem, lists, packed_blocks=blocks),
            incoming=incoming.strided(heads),
            wanted=tuple(strided(x, heads) for x in group),
            order=strided(order, heads),
            group=heads // kv_heads,
            dealt=parts.dealt,
            split=parts.split,
            BY_GROUP=parts.by_group,
            **(options | dict(v=None) if ds_is_made else options),
        )
    parts.add()


def fill_of(problem: Problem, _d_bias: Tensor | None = None) -> tuple[int, int]:
    """(programs that would have whole groups of heads, about how many run at once)."""
    batch, kv_heads, len_k = problem.key.shape[:3]
    programs = triton.cdiv(len_k, pick("keys", problem).block_n) * kv_heads * batch
    return programs, PROGRAMS_PER_PROCESSOR * processors(problem.query.device)


@triton.jit
def _key_gradients_kernel(
    q, k, v, rules, incoming, wanted, order, group, dealt, split, heads, len_q, len_k, BY_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one (batch, key-value head), from a grid of one axis. Walks the group's heads and their queries, or those
    that are `dealt` to it, of each head a `split`.

    What it stores for each key it stores where the keys lie, or where `order` says. Sums over the queries are those of a head, or BY_GROUP.
    Where dBias holds dS already, no V is given, and dK is the product.
    """
    follow()
    DS_IS_MADE: tl.constexpr = v is None
    numbers = numbers_of(heads, group, dealt)
    if split is not None:
        numbers *= split.count
    walked = tl.cdiv(len_q, 64) * heads_of_part(group, dealt) * (HEAD_DIM + VALUE_DIM)
    block, number, batch = place_keys(rules, len_k, numbers, BLOCK_N, walked=walked)
    number, part = split_of(number, split)
    _kv_head, first_head, count = part_of_group(number, group, dealt)
    cols = Span(block * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM % BLOCK_D == 0 else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM % BLOCK_DV == 0 else VALUE_DIM)
    first_seq = sequence(rules.ends, batch, first_head, len_q, len_k)
    if rules.ends is not None:
        cols = Span(cols.start, cols.index, first_seq.len_k)
    k_tiles = load_pieces(k, first_seq, cols, dims, (HEAD_DIM - 1) // BLOCK_D + 1)  # [BLOCK_N, BLOCK_D]
    VALUE_PIECES: tl.constexpr = (VALUE_DIM - 1) // BLOCK_DV + 1
    v_tiles = None
    if not DS_IS_MADE:
        v_tiles = load_pieces(v, first_seq, cols, value_dims, VALUE_PIECES)  # [BLOCK_N, BLOCK_DV]
    places = cols
    if order is not None:
        places = Span(0, load_rows(order, first_seq, cols, LARGEST).to(tl.int64), LARGEST)
    dk = zero_pieces(BLOCK_N, BLOCK_D, len(k_tiles))
    dv = zero_pieces(BLOCK_N, BLOCK_DV, VALUE_PIECES)
    d_k, d_v, key_sums, d_bias = wanted
    d_out, lse, delta = incoming
    incoming = (q, d_out, lse, delta)
    wanted = (d_k, d_v, key_sums, d_bias)
    sums = tl.full([BLOCK_N], 0.0, tl.float32)
    for head in tl.range(first_head, first_head + count):
        seq = under_head(first_seq, head)
        if not BY_GROUP:
            sums = tl.full([BLOCK_N], 0.0, tl.float32)
        begin, end, full_end = query_range(rules, seq, cols, BLOCK_M, BLOCK_N)
        first, last = begin, end
        if split is not None:  # where there are no lists, so that full_end is end
            begin, end = steps_of_part(begin, end, part, split.count, BLOCK_M)
            full_end = end
        following = walk_step(rules, seq, cols, seq.len_q, begin, end, full_end, BLOCK_N, BLOCK_M)
        for FULL in tl.static_range(1 if rules.lists is None else 2):  # blocks of lists of which no pair is hidden come last
            for step in tl.range(end if FULL else begin, full_end if FULL else end, BLOCK_M):
                start, following = walk_steps(rules, seq, cols, seq.len_q, step, following, end, full_end, BLOCK_N, BLOCK_M)
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else seq.len_q)
                dk, dv, sums = _add_tile(
                    incoming, k_tiles, v_tiles, rules, seq, wanted, dk, dv, sums, rows, cols, dims, value_dims,
                    EDGE=not FULL, DS_IS_MADE=DS_IS_MADE, PRECISION=PRECISION,
                )  # fmt: skip
        if rules.lists is None and rules.first is None and rules.ends is None and not DS_IS_MADE:
            stride = BLOCK_M  # of what is dealt out as well
            if split is not None:
                stride *= split.count
            for start in tl.range(part * BLOCK_M, first, stride):
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), len_q)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
            for start in tl.range(first + (tl.cdiv(last - first, BLOCK_M) + part) * BLOCK_M, len_q, stride):
                rows = Span(start, tl.arange(0, BLOCK_M).to(INDEX), len_q)
                store_zeros(d_bias, seq, rows, cols, BLOCK_M, BLOCK_N)
        if key_sums is not None and not BY_GROUP:
            store_rows(key_sums, seq, places, sums)
    if key_sums is not None and BY_GROUP:
        store_rows(key_sums, under_part(key_sums, first_seq, dealt), places, sums)
    first_seq = under_split(first_seq, part, split)
    if d_k is not None:
        store_pieces(d_k, under_part(d_k, first_seq, dealt), places, dims, times(dk, rules.scale))
    if d_v is not None:
        store_pieces(d_v, under_part(d_v, first_seq, dealt), places, value_dims, dv)


@triton.jit
def _add_tile(
    incoming, k_tiles, v_tiles, rules, seq, wanted, dk, dv, sums, rows, cols, dims, value_dims, EDGE: tl.constexpr,
    DS_IS_MADE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries added to (dk, dv, sums), each only if it is wanted: dS, stored if dBias is, or read where DS_IS_MADE already."""
    q, d_out, lse, delta = incoming
    d_k, d_v, key_sums, d_bias = wanted
    q_tiles = load_pieces(q, seq, rows, dims, len(k_tiles))  # [BLOCK_M, BLOCK_D]
    if DS_IS_MADE:
        dk = over_rows(tl.trans(load_pairs(d_bias, seq, rows, cols)), q_tiles, dk, PRECISION)
    else:
        d_out_tiles = load_pieces(d_out, seq, rows, value_dims, len(v_tiles))  # [BLOCK_M, BLOCK_DV]
        lse_rows = load_rows(lse, seq, rows, float("-inf"))
        delta_rows = load_rows(delta, seq, rows, 0.0)
        p, ds, tanh = score_gradient(
            q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, delta_rows, rules, seq, rows, cols, EDGE=EDGE, KEYS_DOWN=True, PRECISION=PRECISION
        )
        if d_v is not None:
            dv = over_rows(p, load_again(d_out_tiles, d_out, seq, rows, value_dims), dv, PRECISION)
        if key_sums is not None:
            sums += tl.sum(ds, 1)
        if d_bias is not None:
            store_pairs(d_bias, seq, rows, cols, tl.trans(ds))
        if d_k is not None:
            dk = over_rows(through_softcap(ds, tanh, rules), load_again(q_tiles, q, seq, rows, dims), dk, PRECISION)
    return dk, dv, sums
