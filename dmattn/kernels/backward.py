"""The backward pass: terms of rows, dK and dV by blocks of keys, dQ by blocks of queries, and dBias where its shape says.

Where all pairs of a (batch, head) fit one tile, one kernel does all of that; where dQ of a (batch, head) fits in registers, one kernel does
dQ, dK and dV; where few share a bias, one does dQ and dBias, and so where many with narrow heads share one that fits on chip.
"""

from typing import Any

import torch
from torch import Tensor

from ..broadcast import per_query_gradient
from .base.key_sums import empty_key_sums
from .base.launch import on_its_device
from .base.query_terms import Incoming, fill_terms
from .hopper import query_grad as hopper_query_grad
from .hopper import shared_query_grad as hopper_shared_query_grad
from .hopper.resident import bias as hopper_resident
from .hopper.resident import key_grad as hopper_resident_key_grad
from .hopper.resident import query_grad as hopper_resident_query_grad
from .portable import rows
from .portable.bias_grad import BiasGradient, shared_gradient, sum_of_key_sums
from .portable.key_grad import key_gradients, takes_lifts
from .portable.one_tile import fits, window_gradients
from .portable.query_grad import query_gradients
from .selection.reorder import reordered


@on_its_device
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
        key_sums = empty_key_sums(d_bias, problem, fits(problem))
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
        _by_blocks(problem, out, lse, d_out, d_lse, *wanted, order)
    if kind is BiasGradient.PER_KEY and key_sums is not d_bias:
        sum_of_key_sums(key_sums, d_bias)
    elif kind is BiasGradient.PER_QUERY:
        per_query_gradient(lse, d_lse, d_bias)


def _by_blocks(
    problem: Any,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
    key_sums: Tensor | None,
    order: Tensor | None,
) -> None:
    """Fill those that are not None, whatever the lengths; `d_bias` has its lengths in full.

    `order` is that of the problem's keys (:func:`key_gradients`).
    """
    shared = d_bias is not None and BiasGradient.of(d_bias, problem) is BiasGradient.SHARED
    dense = None if shared else d_bias
    keys_wanted = d_key is not None or d_value is not None
    in_rows = rows.takes(problem)
    incoming = Incoming.without_terms(d_out, lse, lifted=keys_wanted and not in_rows and takes_lifts(problem, d_out))
    if hopper_resident.takes_backward(problem, d_out, d_query):
        fill_terms(problem, incoming, out, d_lse)
        if d_query is not None or d_bias is not None:  # whose parts lie in the memory of dK or dV until these are made
            hopper_resident_query_grad.query_gradients(problem, incoming, d_query, d_bias, (d_key, d_value))
        if keys_wanted:
            hopper_resident_key_grad.key_gradients(problem, incoming, d_key, d_value)
        return
    if shared and d_query is not None and not in_rows and hopper_shared_query_grad.takes(problem, d_out, d_bias):
        fill_terms(problem, incoming, out, d_lse)
        hopper_shared_query_grad.query_and_bias_gradients(problem, incoming, d_query, d_bias)
        d_query, shared = None, False
    elif d_query is not None and dense is None and not in_rows and hopper_query_grad.takes(problem, d_out, out):
        hopper_query_grad.query_gradients(problem, incoming, out, d_lse, d_query)
        d_query = None
    else:
        fill_terms(problem, incoming, out, d_lse)
    if not in_rows:
        stored = keys_wanted and _serves_queries(dense, problem)
        if keys_wanted or key_sums is not None:
            key_gradients(problem, incoming, d_key, d_value, key_sums, dense if stored else None, order)
        if d_query is not None or (dense is not None and not stored):
            query_gradients(problem, incoming, d_query, dense, stored)
    elif keys_wanted or any(x is not None for x in (d_query, dense, key_sums)):
        rows.row_gradients(problem, incoming, d_query, d_key, d_value, dense, key_sums)
    if shared:
        shared_gradient(problem, incoming, d_bias)


def _serves_queries(dense: Tensor | None, problem: Any) -> bool:
    """Whether a dBias that is dS is what dQ is the product of, so that dS need not be computed twice.

    It is where nothing stands between scores and products, and where the bias's dtype rounds dS no more than a product with the keys does.
    """
    return dense is not None and problem.softcap is None and dense.dtype in (problem.query.dtype, torch.float32)
