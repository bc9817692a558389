"""The backward pass where a whole row, and a whole column, of the scores lies in one tile: windows of images, short rows of text.

Everything comes from one look at each (batch, head): dQ, dK, dV and dBias are five products, and delta is a sum over the tile's own rows, so
that neither `out` nor a kernel for delta is needed. A program walks (batch, head) after (batch, head), and loads the next while it computes. Of
heads that share keys it has the whole group, and their dK and dV in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.key_sums import by_group
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, strided, under_head
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.parts import empty_parts, sum_parts
from ..base.place import LARGEST, member_of
from ..base.rules import load_bias2, rules_of, through_softcap
from ..base.softmax import probabilities
from ..base.tiles import Tile, launch_options, pick
from .bias_grad import Sharing

SUMMING_PER_PROCESSOR = 2  # programs that sum dBias: as many as run at once by their registers, so that all of them end together
PROGRAMS_PER_PROCESSOR = 12  # others: whole rounds, whether two, three or four run at once
LEAST_BLOCK = 32
SUMS_BY_HEAD, SUMS_BY_GROUP = tl.constexpr(1), tl.constexpr(2)  # of the sums over queries, where heads share keys


def gradients(
    problem: Problem,
    incoming: tuple[Tensor, Tensor, Tensor | None],
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
    key_sums: Tensor | None,
    order: Tensor | None,
) -> None:
    """Fill those that are not None; `incoming` is (d_out, lse, d_lse).

    `d_bias` has the bias's shape, with its lengths in full; `key_sums` (B, H, 1, Sk) are the sums of dS over the queries, or (B, Hk, 1, Sk)
    those over the queries of a group of heads. `order` says where the gradients and sums of keys belong, as in key_grad.py.
    """
    heads, group = problem.query.shape[1], problem.query.shape[1] // problem.key.shape[1]
    shared = d_bias is not None and d_bias.shape[:2] != problem.query.shape[:2]
    if shared:
        slices, sharing = d_bias.shape[0] * d_bias.shape[1], sharing_of(problem, d_bias)
        summed = empty_parts(d_bias, sharing.splits)
    else:
        slices = heads // group
        sharing = Sharing.of_nothing(problem, PROGRAMS_PER_PROCESSOR, group)
        summed = d_bias
    per_head = (strided(x, heads) for x in (d_query, d_key, d_value))
    launch(
        _one_tile_gradients_kernel,
        slices * sharing.splits,
        rules=rules_of(problem),
        incoming=tuple(strided(x, heads) for x in incoming),
        wanted=(*per_head, strided(summed, heads if summed is None else summed.shape[1]), strided(vectors_of(key_sums), heads)),
        order=strided(order, heads),
        sharing=(*sharing.argument, sharing.spread),
        SUMMED=shared,
        HELD=shared or (problem.bias is not None and problem.bias.shape[0] == 1 and heads // problem.bias.shape[1] % group == 0),
        SHARED=None if group == 1 else SUMS_BY_GROUP.value if by_group(problem, key_sums) else SUMS_BY_HEAD.value,
        **launch_options(problem, _tile_of_gradients(problem, group, shared), incoming[0], d_query, d_key, d_value, summed),
    )
    if shared:
        sum_parts(summed, d_bias)


def sharing_of(problem: Problem, d_bias: Tensor) -> Sharing:
    """That of a gradient which is a sum over members."""
    slices, group = d_bias.shape[0] * d_bias.shape[1], problem.query.shape[1] // problem.key.shape[1]
    return Sharing.of(d_bias, problem, slices, SUMMING_PER_PROCESSOR, together=group)


def tile_of(problem: Problem, kernel: str = "one tile") -> Tile:
    """The smallest tile of a kernel that holds all pairs of a (batch, head)."""
    tile = pick(kernel, problem)
    block_m, block_n = (
        min(most, max(LEAST_BLOCK, triton.next_power_of_2(length)))
        for length, most in ((problem.query.shape[2], tile.block_m), (problem.key.shape[2], tile.block_n))
    )
    return tile._replace(block_m=block_m, block_n=block_n)


def _tile_of_gradients(problem: Problem, group: int, shared: bool) -> Tile:
    """That of the backward pass. Beside the sum of a shared dBias a group's kernel has no registers to load ahead."""
    lengths = problem.query.shape[2], problem.key.shape[2]
    if (max(lengths) if group == 1 else min(lengths)) <= LEAST_BLOCK:
        tile = tile_of(problem, "one tile of few")
    else:
        tile = tile_of(problem, "one tile" if group == 1 else "one tile of groups")
    return tile._replace(stages=1) if shared and group > 1 else tile


@triton.jit
def _one_tile_gradients_kernel(
    q, k, v, rules, incoming, wanted, order, sharing, heads, len_q, len_k, SUMMED: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: its share of the (batch, head) members of one slice, one after the other, all queries and keys of each.

    Members of a group, whose keys are SHARED, are neighbours. Writes each member's d_q and, unless it is SUMMED, d_bias; each group's d_k and
    d_v; key_sums of a head or a group; the sum of d_bias over the members once at the end. Grid of one axis: heads of slices fastest, then
    batch entries of slices, parts.
    """
    follow()
    d_q, d_k, d_v, d_bias, key_sums = wanted
    wanted = (d_q, d_k, d_v, d_bias, key_sums)  # up to Triton 3.6 a kernel's own tuple that holds a None is passed on wrongly
    slice_batch, sharing_heads, members, members_per_part, spread = sharing
    slice_heads = heads // sharing_heads
    slice_head = tl.program_id(0) % slice_heads
    part_entry = tl.program_id(0) // slice_heads
    entry = part_entry % slice_batch
    begin = part_entry // slice_batch * members_per_part
    end = tl.minimum(begin + members_per_part, members)
    rows = Span(0, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    cols = Span(0, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    of_slice = Sequence(entry, slice_head, len_q, len_k)
    bias2 = None
    if HELD:
        bias2 = load_bias2(rules, member_of(None, of_slice, 0, sharing_heads, spread), rows, cols, KEYS_DOWN=False)
    if SHARED is None:
        for member in tl.range(begin, end, disable_licm=True):  # offsets of seven tensors, kept from one turn to the next, would spill
            seq = member_of(None, of_slice, member, sharing_heads, spread)
            of_member = _add_member(
                q, k, v, incoming, wanted, order, 0.0, 0.0, rules, seq, rows, cols, dims, value_dims, bias2, total, 0.0, 0.0, 0.0,
                SUMMED=SUMMED, SHARED=SHARED, PRECISION=PRECISION,
            )  # fmt: skip  # no zero is read
            total = of_member[0]  # all that is not stored yet
    else:
        for first in tl.range(begin, end, k.group, disable_licm=True):
            of_group = member_of(None, of_slice, first, sharing_heads, spread)
            k_tile = load_tile(k, of_group, cols, dims)  # [BLOCK_N, BLOCK_D]
            v_tile = load_tile(v, of_group, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
            places = cols
            if order is not None:
                places = Span(0, load_rows(order, of_group, cols, LARGEST).to(tl.int64), LARGEST)
            dk = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
            dv = tl.full([BLOCK_N, BLOCK_DV], 0.0, tl.float32)
            sums = tl.full([BLOCK_N], 0.0, tl.float32)
            for head in tl.range(of_group.head, of_group.head + k.group):
                seq = under_head(of_group, head)
                total, dk, dv, sums = _add_member(
                    q, k, v, incoming, wanted, order, k_tile, v_tile, rules, seq, rows, cols, dims, value_dims, bias2, total, dk, dv, sums,
                    SUMMED=SUMMED, SHARED=SHARED, PRECISION=PRECISION,
                )  # fmt: skip
            if d_v is not None:
                store_tile(d_v, of_group, places, value_dims, dv)
            if d_k is not None:
                store_tile(d_k, of_group, places, dims, dk * rules.scale)
            if key_sums is not None and SHARED == SUMS_BY_GROUP:
                store_rows(key_sums, of_group, places, sums)
    if SUMMED:
        part_seq = Sequence(part_entry, slice_head, len_q, len_k)
        store_tile(d_bias, part_seq, rows, cols, total)


@triton.jit
def _add_member(
    q, k, v, incoming, wanted, order, k_tile, v_tile, rules, seq, rows, cols, dims, value_dims, bias2, total, dk, dv, sums,
    SUMMED: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(total, dk, dv, sums) with those of one (batch, head), whose d_q and, unless it is SUMMED, d_bias are stored.

    Where keys are not SHARED, they are loaded here; and dk, dv and sums are stored at once, as they would take registers up to the end.
    """
    d_out, lse, d_lse = incoming
    d_q, d_k, d_v, d_bias, key_sums = wanted
    places = cols
    if order is not None:
        places = Span(0, load_rows(order, seq, cols, LARGEST).to(tl.int64), LARGEST)
    q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
    if SHARED is None:
        k_tile = load_tile(k, seq, cols, dims)
        v_tile = load_tile(v, seq, cols, value_dims)
    d_out_tile = load_tile(d_out, seq, rows, value_dims)  # [BLOCK_M, BLOCK_DV]
    lse_rows = load_rows(lse, seq, rows, float("-inf"))
    factors = ((q_tile,), (k_tile,), (v_tile,), (d_out_tile,))
    p, weights, d_p, tanh = probabilities(
        *factors, lse_rows, rules, seq, rows, cols, EDGE=True, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2
    )
    if d_v is not None:
        if SHARED is None:
            store_tile(d_v, seq, places, value_dims, _over_queries(weights, d_out_tile, None, PRECISION))
        else:
            dv = _over_queries(weights, d_out_tile, dv, PRECISION)
    delta_rows = tl.sum(p * d_p, 1)
    if d_lse is not None:  # that of an empty row may be anything
        delta_rows = tl.where(lse_rows == float("-inf"), 0.0, delta_rows - load_rows(d_lse, seq, rows, 0.0))
    ds = p * (d_p - delta_rows[:, None])
    if SUMMED:
        total += ds
    elif d_bias is not None:
        store_tile(d_bias, seq, rows, cols, ds)
    if key_sums is not None:
        if SHARED == SUMS_BY_GROUP:
            sums += tl.sum(ds, 0)
        else:
            store_rows(key_sums, seq, places, tl.sum(ds, 0))
    d_scores = through_softcap(ds, tanh, rules)
    if d_k is not None:
        if SHARED is None:
            store_tile(d_k, seq, places, dims, _over_queries(d_scores, q_tile, None, PRECISION) * rules.scale)
        else:
            dk = _over_queries(d_scores, q_tile, dk, PRECISION)
    if d_q is not None:
        dq = tl.dot(d_scores.to(k_tile.dtype), k_tile, input_precision=PRECISION)
        store_tile(d_q, seq, rows, dims, dq * rules.scale)
    return total, dk, dv, sums


@triton.jit
def _over_queries(pairs, tile, acc, PRECISION: tl.constexpr):
    """[BLOCK_N, dims]: the sum over queries of pairs times a tile that has a row for each, added to `acc` if there is one."""
    return tl.dot(tl.trans(pairs.to(tile.dtype)), tile, acc, input_precision=PRECISION)
