"""The backward pass: delta, then dK and dV by blocks of keys, dQ by blocks of queries, and dBias where its shape says.

Where all pairs of a (batch, head) fit one tile, one kernel does all of that; where dQ of a (batch, head) fits in registers, one kernel does
dQ, dK and dV; where many (batch, head) with narrow heads share a bias that fits on chip, dBias is made with dQ.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..broadcast import per_query_gradient
from . import hopper_resident, hopper_resident_key_grad, hopper_resident_query_grad, rows
from .bias_grad import BiasGradient, shared_gradient, sum_of_key_sums
from .hopper_key_tile import packed_rows
from .key_grad import key_gradients, parts_of_key_sums
from .layout import Sequence, Span, load_rows, load_tile, store_rows, strided
from .query_grad import query_gradients
from .reorder import reordered
from .replay import launch, replayed
from .sequence import place
from .tiles import block_dim
from .windows import fits, window_gradients

DELTA_ROWS = 32


@replayed
def backward(
    problem: Any,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Fill the gradients that are not None; `problem` is a `dmattn.problem.Problem`, `out`, `lse` and its `states` are the forward pass's."""
    order, len_k = problem.order, problem.key.shape[2]
    if order is not None:
        problem = reordered(problem)
    kind = None if d_bias is None else BiasGradient.of(d_bias, problem)
    d_pairs = d_bias if kind in (BiasGradient.DENSE, BiasGradient.SHARED) else None
    key_sums = None
    if kind is BiasGradient.PER_KEY:
        parts = 1 if fits(problem) else parts_of_key_sums(problem, d_out)
        key_sums = lse.new_empty((*lse.shape[:2], parts, len_k))
    if order is not None and order.shape[2] < len_k:
        for of_keys in (d_key, d_value, key_sums):
            if of_keys is not None:
                of_keys.zero_()  # what the order does not name
    wanted = (d_query, d_key, d_value, d_pairs, key_sums)
    if all(gradient is None for gradient in wanted):
        pass  # a gradient per query alone is that of lse
    elif fits(problem):
        window_gradients(problem, (d_out, lse, d_lse), *wanted, order)
    else:
        _by_blocks(problem, (d_out, lse, _delta(out, d_out, d_lse, lse)), *wanted, order)
    if kind is BiasGradient.PER_KEY:
        sum_of_key_sums(key_sums, d_bias)
    elif kind is BiasGradient.PER_QUERY:
        per_query_gradient(lse, d_lse, d_bias)


def _by_blocks(
    problem: Any,
    incoming: tuple[Tensor, Tensor, Tensor],
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
    key_sums: Tensor | None,
    order: Tensor | None,
) -> None:
    """Fill those that are not None, whatever the lengths; `incoming` is (d_out, lse, delta), `d_bias` has its lengths in full.

    `order` is that of the problem's keys (:func:`key_gradients`).
    """
    shared = d_bias is not None and BiasGradient.of(d_bias, problem) is BiasGradient.SHARED
    dense = None if shared else d_bias
    keys_wanted = d_key is not None or d_value is not None
    if hopper_resident.takes_backward(problem, incoming[0]):
        _resident(problem, incoming, d_query, d_key, d_value, d_bias)
        return
    if not rows.takes(problem):
        stored = keys_wanted and _serves_queries(dense, problem)
        if keys_wanted or key_sums is not None:
            key_gradients(problem, incoming, d_key, d_value, key_sums, dense if stored else None, order)
        if d_query is not None or (dense is not None and not stored):
            query_gradients(problem, incoming, d_query, dense, stored)
    elif keys_wanted or any(x is not None for x in (d_query, dense, key_sums)):
        rows.row_gradients(problem, incoming, d_query, d_key, d_value, dense, key_sums)
    if shared:
        shared_gradient(problem, incoming, d_bias)


def _resident(
    problem: Any,
    incoming: tuple[Tensor, Tensor, Tensor],
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """As :func:`_by_blocks`, where the bias stays on chip. Parts of dBias lie in the memory of dK or dV until these are made."""
    d_out, lse, delta = incoming
    packed = packed_rows(lse, delta)
    if d_query is not None or d_bias is not None:
        hopper_resident_query_grad.query_gradients(problem, d_out, packed, d_query, d_bias, (d_key, d_value))
    if d_key is not None or d_value is not None:
        hopper_resident_key_grad.key_gradients(problem, d_out, packed, d_key, d_value)


def _serves_queries(dense: Tensor | None, problem: Any) -> bool:
    """Whether a dBias that is dS is what dQ is the product of, so that dS need not be computed twice.

    It is where nothing stands between scores and products, and where the bias's dtype rounds dS no more than a product with the keys does.
    """
    return dense is not None and problem.softcap is None and dense.dtype in (problem.query.dtype, torch.float32)


def _delta(out: Tensor, d_out: Tensor, d_lse: Tensor | None, lse: Tensor) -> Tensor:
    """delta = rowsum(dO * O) - dLSE, (B, H, Sq) float32; 0 for an empty row, whose dLSE may be anything."""
    batch, heads, len_q, value_dim = out.shape
    delta = lse.new_empty(lse.shape)
    launch(
        _delta_kernel,
        triton.cdiv(len_q, DELTA_ROWS) * heads * batch,
        out=strided(out, heads),
        d_out=strided(d_out, heads),
        lse=strided(lse, heads),
        d_lse=strided(d_lse, heads),
        delta=strided(delta, heads),
        heads=heads,
        len_q=len_q,
        VALUE_DIM=value_dim,
        BLOCK_M=DELTA_ROWS,
        BLOCK_DV=block_dim(value_dim),
        enable_fp_fusion=False,  # fused with the sum over lanes, a product is rounded in one lane and not in the next, which then race to store
    )
    return delta


@triton.jit
def _delta_kernel(
    out, d_out, lse, d_lse, delta, heads, len_q, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """One program: delta of BLOCK_M queries of one (batch, head), from a grid of one axis."""
    block, head, batch = place(len_q, heads, BLOCK_M)
    seq = Sequence(batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(tl.int64), len_q)
    dims = Span(0, tl.arange(0, BLOCK_DV).to(tl.int64), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    out_tile = load_tile(out, seq, rows, dims).to(tl.float32)
    d_out_tile = load_tile(d_out, seq, rows, dims).to(tl.float32)
    total = tl.sum(out_tile * d_out_tile, 1)
    if d_lse is not None:
        total -= load_rows(d_lse, seq, rows, 0.0)
        total = tl.where(load_rows(lse, seq, rows, 0.0) == float("-inf"), 0.0, total)
    store_rows(delta, seq, rows, total)
