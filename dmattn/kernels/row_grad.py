"""dQ and the dBias of a shared bias in one, where keys are few: a program owns some rows of the bias against all keys, and walks its members.

Scores, dP and dS of a pair serve both gradients, which otherwise two kernels compute them for.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .bias_grad import BiasGradient, Sharing, processors
from .layout import Sequence, Span, load_rows, load_tile, store_tile, strided
from .scores import rules_of, through_softcap
from .softmax import score_gradient
from .tiles import Tile, launch_options, pick

PROGRAMS_PER_PROCESSOR = 2  # as many as run at once: their sums take most of the registers
MEMORY_SHARE = 0.2  # as in `bias_grad`, but more: there are few tiles, and without parts they do not fill the GPU
MOST_TILES = 6  # of keys, whose sums fit the registers


def fits_rows(problem: Any, d_bias: Tensor) -> bool:
    """Whether dBias (B or 1, H or Hk or 1, Sq, Sk) is summed by whole rows.

    Their keys have to fit, in whole tiles, as bounds would take registers; and neither window nor intervals may leave tiles out, nor too few
    programs most of the GPU idle.
    """
    tile = pick("rows", problem)
    whole = d_bias.shape[3] in (tile.block_n * tiles for tiles in range(1, MOST_TILES + 1))
    unbounded = problem.left is None and problem.right is None and problem.first is None
    if not (whole and unbounded and BiasGradient.of(d_bias, problem) is BiasGradient.SHARED):
        return False
    blocks, sharing = _work(problem, d_bias, tile)
    return 2 * blocks * sharing.splits >= PROGRAMS_PER_PROCESSOR * processors(problem.query.device)


def row_gradients(problem: Any, incoming: tuple[Tensor, Tensor, Tensor], d_query: Tensor, d_bias: Tensor) -> None:
    """Fill both, of a problem that :func:`fits_rows`; `incoming` is (d_out, lse, delta)."""
    heads = problem.query.shape[1]
    tile = pick("rows", problem)
    blocks, sharing = _work(problem, d_bias, tile)
    parts = sharing.parts(d_bias)
    d_out, lse, delta = (strided(x, heads) for x in incoming)
    _row_gradients_kernel[(blocks * sharing.splits,)](
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem),
        d_out=d_out,
        lse=lse,
        delta=delta,
        d_q=strided(d_query, heads),
        parts=strided(parts, sharing.heads),
        **sharing.arguments,
        TILES=triton.cdiv(d_bias.shape[3], tile.block_n),
        **launch_options(problem, tile, incoming[0], d_query, parts),
    )
    sharing.sum_parts(parts, d_bias)


def _work(problem: Any, d_bias: Tensor, tile: Tile) -> tuple[int, Sharing]:
    """How many blocks of rows the bias has, and how the members of each are split."""
    blocks = triton.cdiv(d_bias.shape[2], tile.block_m) * d_bias.shape[0] * d_bias.shape[1]
    return blocks, Sharing.of(d_bias, problem, blocks, PROGRAMS_PER_PROCESSOR, MEMORY_SHARE)


@triton.jit
def _row_gradients_kernel(
    q, k, v, rules, d_out, lse, delta, d_q, parts, slice_batch, sharing_heads, members, members_per_part, heads, len_q, len_k,
    TILES: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries against all TILES * BLOCK_N keys, in its share of the members of one slice of the bias.

    Writes d_q of every member, and the sum of dS once. Grid of one axis: blocks of queries fastest, then heads and batch entries of slices,
    parts.
    """
    blocks = tl.cdiv(len_q, BLOCK_M)
    slice_heads = heads // sharing_heads
    slice_head = tl.program_id(0) // blocks % slice_heads
    part_entry = tl.program_id(0) // blocks // slice_heads
    entry = part_entry % slice_batch
    begin = part_entry // slice_batch * members_per_part
    end = tl.minimum(begin + members_per_part, members)
    rows = Span(tl.program_id(0) % blocks * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    totals = (tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32),) * TILES
    for member in tl.range(begin, end, disable_licm=True):  # what is kept from one turn to the next takes registers that sums need
        seq = Sequence(entry + member // sharing_heads, slice_head * sharing_heads + member % sharing_heads, len_q, len_k)
        q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
        d_out_tile = load_tile(d_out, seq, rows, value_dims)  # [BLOCK_M, BLOCK_DV]
        lse_rows = load_rows(lse, seq, rows, float("-inf"))
        delta_rows = load_rows(delta, seq, rows, 0.0)
        dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        for tile in tl.static_range(TILES):
            cols = Span(tile * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
            k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
            v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
            tiles = (q_tile, k_tile, v_tile, d_out_tile)
            ds, dq = _accumulate(tiles, lse_rows, delta_rows, rules, seq, dq, rows, cols, PRECISION)
            totals = totals[:tile] + (totals[tile] + ds,) + totals[tile + 1 :]  # noqa: RUF005 (a kernel unpacks no tuple into another)
        store_tile(d_q, seq, rows, dims, dq * rules.scale)
    part_seq = Sequence(part_entry, slice_head, len_q, len_k)
    for tile in tl.static_range(TILES):
        cols = Span(tile * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
        store_tile(parts, part_seq, rows, cols, tl.trans(totals[tile]))


@triton.jit
def _accumulate(tiles, lse_rows, delta_rows, rules, seq, dq, rows, cols, PRECISION: tl.constexpr):
    """(dS of one tile of keys [BLOCK_N, BLOCK_M], dq with it)."""
    q_tile, k_tile, v_tile, d_out_tile = tiles
    _, ds, tanh = score_gradient(q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, seq, rows, cols, True, PRECISION)
    d_scores = through_softcap(ds, tanh, rules).to(k_tile.dtype)
    return ds, tl.dot(tl.trans(d_scores), k_tile, dq, input_precision=PRECISION)
