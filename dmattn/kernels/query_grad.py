"""dQ, and the dBias of a bias that no two (batch, head) share: a program owns a block of queries and walks the keys they may attend."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .layout import at, load_rows, load_tile, span, store_tile, strided
from .scores import is_live, rules_at, rules_of, through_softcap
from .sequence import key_range, place
from .softmax import score_gradient
from .tiles import launch_options, on_device, pick


def query_gradients(problem: Any, incoming: tuple[Tensor, Tensor, Tensor], d_query: Tensor | None, d_bias: Tensor | None) -> None:
    """Fill those that are not None; `incoming` is (d_out, lse, delta), `d_bias` (B, H, Sq, Sk), every element of which is written."""
    batch, heads, len_q, _ = problem.query.shape
    tile = pick("queries", problem)
    d_out, lse, delta = (strided(x, heads) for x in incoming)
    with on_device(problem.query):
        _query_gradients_kernel[(triton.cdiv(len_q, tile.block_m) * heads * batch,)](
            q=strided(problem.query, heads),
            k=strided(problem.key, heads),
            v=strided(problem.value, heads),
            rules=rules_of(problem, tile.block_n),
            d_out=d_out,
            lse=lse,
            delta=delta,
            d_q=strided(d_query, heads),
            d_bias=strided(d_bias, heads),
            **launch_options(problem, tile, incoming[0], d_query, d_bias),
        )


@triton.jit
def _query_gradients_kernel(
    q, k, v, rules, d_out, lse, delta, d_q, d_bias, heads, len_q, len_k,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one (batch, head), from a grid of one axis. Writes dQ, and dS as their rows of dBias."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    rows = span(block * BLOCK_M, None if EVEN_M else len_q, BLOCK_M, WIDE)
    dims = span(0, None if HEAD_DIM == BLOCK_D else HEAD_DIM, BLOCK_D, WIDE)
    value_dims = span(0, None if VALUE_DIM == BLOCK_DV else VALUE_DIM, BLOCK_DV, WIDE)
    rules = rules_at(rules, batch, head)
    loads = (at(k, batch, head), at(v, batch, head))
    d_bias = at(d_bias, batch, head)
    q_tile = load_tile(at(q, batch, head), rows, dims)  # [BLOCK_M, BLOCK_D]
    d_out_tile = load_tile(at(d_out, batch, head), rows, value_dims)  # [BLOCK_M, BLOCK_DV]
    stats = (load_rows(at(lse, batch, head), rows, float("-inf")), load_rows(at(delta, batch, head), rows, 0.0))
    dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    begin, end = key_range(rules, rows, len_q, len_k, BLOCK_M, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        cols = span(start, None if EVEN_N else len_k, BLOCK_N, WIDE)
        if rules.mask is None and rules.first is None:
            dq = _accumulate(loads, q_tile, d_out_tile, stats, rules, d_q, d_bias, dq, rows, cols, dims, value_dims, len_q, len_k, PRECISION)
        else:
            if is_live(rules, rows, cols, BLOCK_M, BLOCK_N):
                dq = _accumulate(
                    loads, q_tile, d_out_tile, stats, rules, d_q, d_bias, dq, rows, cols, dims, value_dims, len_q, len_k, PRECISION
                )
            else:
                _store_zeros(d_bias, rows, start, start + 1, len_k, BLOCK_M, BLOCK_N, WIDE)
    _store_zeros(d_bias, rows, 0, begin, len_k, BLOCK_M, BLOCK_N, WIDE)
    _store_zeros(d_bias, rows, begin + tl.cdiv(end - begin, BLOCK_N) * BLOCK_N, len_k, len_k, BLOCK_M, BLOCK_N, WIDE)
    if d_q is not None:
        store_tile(at(d_q, batch, head), rows, dims, dq * rules.scale)


@triton.jit
def _accumulate(
    loads, q_tile, d_out_tile, stats, rules, d_q, d_bias, dq, rows, cols, dims, value_dims, len_q, len_k, PRECISION: tl.constexpr
):  # fmt: skip
    """One tile of keys: dS stored if dBias is wanted, and added to dq if dQ is."""
    k, v = loads
    lse_rows, delta_rows = stats
    k_tile = load_tile(k, cols, dims)  # [BLOCK_N, BLOCK_D]
    v_tile = load_tile(v, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
    _, ds, tanh = score_gradient(q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, rows, cols, len_q, len_k, PRECISION)
    if d_bias is not None:
        store_tile(d_bias, rows, cols, ds)
    if d_q is not None:
        dq = tl.dot(through_softcap(ds, tanh, rules).to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _store_zeros(d_bias, rows, begin, end, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """The dBias of the tiles from key `begin` to `end`, which nothing attends; nothing if no dBias is wanted."""
    if d_bias is not None:
        for start in tl.range(begin, end, BLOCK_N):
            store_tile(d_bias, rows, span(start, len_k, BLOCK_N, WIDE), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32))
