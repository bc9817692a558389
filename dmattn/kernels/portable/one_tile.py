"""The backward pass where a whole row, and a whole column, of the scores lies in one tile: windows of images, short rows of text.

Everything comes from one look at each (batch, head): dQ, dK, dV and dBias are five products, and delta is a sum over the tile's own rows, so
that neither `out` nor a kernel for delta is needed. A program walks (batch, head) after (batch, head), and loads the next while it computes.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.key_sums import vectors_of
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, strided
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

    `d_bias` has the bias's shape, with its lengths in full; `key_sums` (B, H, 1, Sk) are the sums of dS over the queries.
    `order` says where the gradients and sums of keys belong, as in key_grad.py.
    """
    heads = problem.query.shape[1]
    shared = d_bias is not None and d_bias.shape[:2] != problem.query.shape[:2]
    if shared:
        slices = d_bias.shape[0] * d_bias.shape[1]
        sharing = Sharing.of(d_bias, problem, slices, SUMMING_PER_PROCESSOR)
        summed = empty_parts(d_bias, sharing.splits)
    else:
        slices = heads
        sharing = Sharing.of_nothing(problem, PROGRAMS_PER_PROCESSOR)
        summed = d_bias
    sums = vectors_of(key_sums)
    per_head = (strided(x, heads) for x in (d_query, d_key, d_value))
    launch(
        _one_tile_gradients_kernel,
        slices * sharing.splits,
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem),
        incoming=tuple(strided(x, heads) for x in incoming),
        wanted=(*per_head, strided(summed, heads if summed is None else summed.shape[1]), strided(sums, heads)),
        order=strided(order, heads),
        sharing=sharing.argument,
        spread=sharing.spread,
        SUMMED=shared,
        HELD=shared or (problem.bias is not None and problem.bias.shape[0] == 1),
        **launch_options(problem, tile_of(problem), incoming[0], d_query, d_key, d_value, summed),
    )
    if shared:
        sum_parts(summed, d_bias)


def tile_of(problem: Problem, kernel: str = "one tile") -> Tile:
    """The smallest tile that holds all pairs of a (batch, head)."""
    tile = pick(kernel, problem)

    def block(length: int, most: int) -> int:
        return min(most, max(LEAST_BLOCK, triton.next_power_of_2(length)))

    return tile._replace(block_m=block(problem.query.shape[2], tile.block_m), block_n=block(problem.key.shape[2], tile.block_n))


@triton.jit
def _one_tile_gradients_kernel(
    q, k, v, rules, incoming, wanted, order, sharing, spread, heads, len_q, len_k, SUMMED: tl.constexpr, HELD: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: its share of the (batch, head) members of one slice, one after the other, all queries and keys of each.

    Writes each member's d_q, d_k, d_v, key_sums and, unless it is SUMMED, d_bias; the sum of d_bias over the members once at the end. Grid of
    one axis: heads of slices fastest, then batch entries of slices, parts.
    """
    follow()
    d_out, lse, d_lse = incoming
    d_q, d_k, d_v, d_bias, key_sums = wanted
    slice_batch, sharing_heads, members, members_per_part = sharing
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
    for member in tl.range(begin, end, disable_licm=True):  # offsets of seven tensors, kept from one turn to the next, would spill
        seq = member_of(None, of_slice, member, sharing_heads, spread)
        q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
        k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
        v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
        d_out_tile = load_tile(d_out, seq, rows, value_dims)  # [BLOCK_M, BLOCK_DV]
        lse_rows = load_rows(lse, seq, rows, float("-inf"))
        places = cols
        if order is not None:
            places = Span(0, load_rows(order, seq, cols, LARGEST).to(tl.int64), LARGEST)
        factors = ((q_tile,), (k_tile,), (v_tile,), (d_out_tile,))
        p, weights, d_p, tanh = probabilities(
            *factors, lse_rows, rules, seq, rows, cols, EDGE=True, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2
        )
        if d_v is not None:
            store_tile(d_v, seq, places, value_dims, _over_queries(weights, d_out_tile, PRECISION))
        delta_rows = tl.sum(p * d_p, 1)
        if d_lse is not None:  # that of an empty row may be anything
            delta_rows = tl.where(lse_rows == float("-inf"), 0.0, delta_rows - load_rows(d_lse, seq, rows, 0.0))
        ds = p * (d_p - delta_rows[:, None])
        if SUMMED:
            total += ds
        elif d_bias is not None:
            store_tile(d_bias, seq, rows, cols, ds)
        if key_sums is not None:
            store_rows(key_sums, seq, places, tl.sum(ds, 0))
        d_scores = through_softcap(ds, tanh, rules)
        if d_k is not None:
            store_tile(d_k, seq, places, dims, _over_queries(d_scores, q_tile, PRECISION) * rules.scale)
        if d_q is not None:
            dq = tl.dot(d_scores.to(k_tile.dtype), k_tile, input_precision=PRECISION)
            store_tile(d_q, seq, rows, dims, dq * rules.scale)
    if SUMMED:
        part_seq = Sequence(part_entry, slice_head, len_q, len_k)
        store_tile(d_bias, part_seq, rows, cols, total)


@triton.jit
def _over_queries(pairs, tile, PRECISION: tl.constexpr):
    """[BLOCK_N, dims]: the sum over queries of pairs times a tile that has a row for each."""
    return tl.dot(tl.trans(pairs.to(tile.dtype)), tile, input_precision=PRECISION)
