"""A bias by distance: what its table says of pairs, and the adjoint.

Pair (i, j) stands at place ``j - (i + Sk - Sq) + zero`` of the table's last axis; places beyond an end take that end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_pairs(table: Tensor, zero: int, row_start: int, rows: int, len_q: int, len_k: int) -> Tensor:
    """(..., R) as (..., rows, Sk): of the queries from `row_start` on, of `len_q` in all, and all keys."""
    query = torch.arange(row_start, row_start + rows, device=table.device)[:, None]
    place = torch.arange(len_k, device=table.device) - (query + (len_k - len_q)) + zero
    return table[..., place.clamp(0, table.shape[-1] - 1)]


def add_pairs(total: Tensor, pairs: Tensor, zero: int, row_start: int, len_q: int) -> None:
    """Add (..., rows, Sk), the gradient of :func:`of_pairs`, to that of the table (..., R), in an order that shapes alone decide."""
    rows, len_k = pairs.shape[-2:]
    if pairs.numel() == 0:
        return
    # row i moved right by rows - 1 - i: the pairs of one distance share a column
    sheared = torch.nn.functional.pad(pairs.flip(-2), (0, rows)).flatten(-2)[..., : rows * (len_k + rows - 1)]
    sums = sheared.unflatten(-1, (rows, len_k + rows - 1)).sum(-2)
    lowest = zero - (row_start + rows - 1 + len_k - len_q)  # the place of the first sum
    last = total.shape[-1] - 1
    below, above = (min(max(bound - lowest, 0), sums.shape[-1]) for bound in (0, last + 1))
    total[..., 0] += sums[..., :below].sum(-1)
    total[..., last] += sums[..., above:].sum(-1)
    if below < above:
        total[..., lowest + below : lowest + above] += sums[..., below:above]
