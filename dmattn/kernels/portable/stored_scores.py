"""The backward pass of short rows in float32: dS of a few batch entries at a time is stored, and what else depends on it is made of that.

A product of float32 takes as long as six of 16 bits, so that to make dS again takes longer than to write and read it. key_grad.py makes dK, dV
and dS, as where dS is the gradient of a bias; dQ is the product of dS and the keys (query_grad.py), and the gradient of a bias that members
share is a sum. Those are five products, where kernels that make dS again need seven, or beside such a bias nine. What is stored takes no more
than ROOM, whatever the size of the problem.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
from torch import Tensor

from ...problem import Problem
from ..base.query_terms import Incoming
from .key_grad import key_gradients
from .query_grad import query_gradients

ROOM = 128 << 20  # bytes of dS at once: enough for short rows to fill a GPU several times
_BY_ENTRY = ("query", "key", "value", "mask", "blocks", "states", "bias")  # fields of a problem that may differ among batch entries


def entries_at_once(batch: int, heads: int, len_q: int, len_k: int) -> int:
    """Of how many batch entries dS is stored at once: 0 if not even that of one fits into ROOM."""
    most = ROOM // max(1, 4 * heads * len_q * len_k)
    return triton.cdiv(batch, triton.cdiv(batch, most)) if min(batch, most) else 0


def in_parts(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """The batch entries that are worked on at once, part after part, with the problem that they are."""
    (batch, heads, len_q, _), len_k = problem.query.shape, problem.key.shape[2]
    entries = entries_at_once(batch, heads, len_q, len_k)
    fields = {name: x for name in _BY_ENTRY if (x := getattr(problem, name)) is not None and x.shape[0] > 1}
    for begin in range(0, batch, entries):
        part = slice(begin, min(begin + entries, batch))
        yield part, problem._replace(**{name: x[part] for name, x in fields.items()})


def gradients(
    problem: Problem,
    incoming: Incoming,
    tokens: tuple[Tensor, Tensor, Tensor],
    d_bias: Tensor | None,
    key_sums: Tensor | None,
) -> None:
    """Fill `tokens`, which are dQ, dK and dV, and those of the others that are not None.

    `d_bias` (B or 1, H or Hk or 1, Sq, Sk) is that of a bias that members share, `key_sums` are those of key_grad.py.
    """
    shape = *problem.query.shape[:3], problem.key.shape[2]
    entries = entries_at_once(*shape)
    stored = incoming.lse.new_empty((entries, *shape[1:]))
    total = None
    for part, few in in_parts(problem):
        few_incoming = Incoming(*(x if x is None else x[part] for x in incoming))
        d_query, d_key, d_value = (x[part] for x in tokens)
        d_scores = stored[: part.stop - part.start]
        key_gradients(few, few_incoming, d_key, d_value, None if key_sums is None else key_sums[part], d_scores, None)
        query_gradients(few, few_incoming, None, d_query, d_scores)
        if d_bias is None:
            continue
        if d_bias.shape[0] > 1:
            d_bias[part].copy_(_sum_over_members(d_scores, d_scores.shape[0], d_bias.shape[1]))
        elif total is None:
            total = _sum_over_members(d_scores, 1, d_bias.shape[1])
        else:
            total.add_(_sum_over_members(d_scores, 1, d_bias.shape[1]))
    if d_bias is not None and total is not None:
        d_bias.copy_(total)


def _sum_over_members(d_scores: Tensor, batch: int, heads: int) -> Tensor:
    """dS of (batch, head) that share a slice of a bias, which has so many, added in float32."""
    entries, all_heads = d_scores.shape[:2]
    return d_scores.view(batch, entries // batch, heads, all_heads // heads, *d_scores.shape[2:]).sum((1, 3))
