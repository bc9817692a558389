"""The PyTorch path, for CPU tensors and float64: the formulas over chunks of query rows, which all (batch, head) compute together.

Temporaries are a few times the scores of a chunk: CHUNK_SCORES, or where that is more, MIN_ROWS rows of each (batch, head). Half precision
is computed in float32 and rounded once, as the kernels do. A chunk has only the keys that a window leaves one of its rows, and beside intervals
on a CPU those from the first to the last that one of its rows sees: of packed sequences those of its own, as in a loop over them. Forward, a
chunk is PyTorch's own kernel's wherever that is exact (:mod:`.torch_kernel`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .. import distances, reference
from ..broadcast import per_query_gradient, sum_to
from ..problem import HEADS, PAIRS, QUERIES, Problem
from ..reference import fold_groups, kept_factor, masked_scores
from . import torch_kernel

CHUNK_SCORES = 1 << 21  # scores alive at a time: 8 MiB in float32, a few times over in temporaries; of fewer, sums over chunks take long
MIN_ROWS = 16
WINDOW_ROWS = 128  # at most, of a chunk of a window: the same
PACKED_ROWS = 128  # at most, of a chunk of packed sequences: more would compute more pairs that no query sees


@torch.no_grad()
def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Write (out, lse) of `problem`."""
    dtype = _compute_dtype(problem)
    problem = problem._replace(key=problem.key.to(dtype), value=problem.value.to(dtype))
    attend, scores = reference.attend, _scores(problem)
    if torch_kernel.serves(problem):
        problem, attend, scores = torch_kernel.prepared(problem), torch_kernel.attend, torch_kernel.scores_added(problem)
    for rows, keys, chunk in _chunks(problem, scores):
        out[:, :, rows], lse[:, :, rows] = attend(chunk, dtype, rows.start, _aligned_length(problem, keys))


@torch.no_grad()
def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    d_query: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Write the gradients that are not None, recomputing each chunk; sums over chunks are rounded once."""
    dtype = _compute_dtype(problem)
    kv_heads = problem.key.shape[1]
    key, value = problem.key.to(dtype), problem.value.to(dtype)
    kind = None if d_bias is None else problem.bias_kind
    if d_bias is not None and kind in (QUERIES, HEADS):
        per_query_gradient(lse, d_lse, d_bias)
        d_bias = None
    d_bias_rows, d_bias_keys = (d_bias, None) if kind == PAIRS else (None, d_bias)
    key_sum, value_sum, bias_sum = (
        None if grad is None else torch.zeros(grad.shape, dtype=dtype, device=grad.device) for grad in (d_key, d_value, d_bias_keys)
    )
    if d_bias_rows is not None:
        d_bias_rows.zero_()  # a chunk may not have all keys
    for rows, keys, chunk in _chunks(problem._replace(key=key, value=value), _scores(problem)):
        scores, tanh = masked_scores(chunk, dtype, rows.start, _aligned_length(problem, keys))
        empty = lse[:, :, rows, None] == float("-inf")
        p = torch.softmax(scores.masked_fill_(empty, 0.0), -1)
        d_out_rows = d_out[:, :, rows].to(dtype).masked_fill(empty, 0.0)
        factor = None if problem.seed is None else kept_factor(chunk, dtype, rows.start)
        if value_sum is not None:
            weights = p if factor is None else p * factor
            value_sum[:, :, keys] += fold_groups(weights, kv_heads).transpose(-1, -2) @ fold_groups(d_out_rows, kv_heads)
        delta = (d_out_rows * out[:, :, rows]).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - d_lse[:, :, rows, None]
        d_p = (fold_groups(d_out_rows, kv_heads) @ chunk.value.transpose(-1, -2)).view(p.shape)
        if factor is not None:
            d_p *= factor
        d_scores = (p * (d_p - delta)).masked_fill_(empty, 0.0)
        if d_bias_rows is not None:  # each chunk has rows of its own
            part = d_bias_rows[:, :, rows, keys]
            part.copy_(sum_to(d_scores, part.shape))
        if bias_sum is not None and problem.zero is not None:
            of_pairs = sum_to(d_scores, (*bias_sum.shape[:2], *d_scores.shape[2:]))
            distances.add_pairs(bias_sum[:, :, 0], of_pairs, problem.zero, rows.start, _aligned_length(problem, keys))
        elif bias_sum is not None:
            part = bias_sum[..., keys]
            part += sum_to(d_scores, part.shape)
        if tanh is not None:
            d_scores = d_scores * (1 - tanh * tanh)
        d_scores = fold_groups(d_scores * problem.scale, kv_heads)
        if d_query is not None:
            d_query[:, :, rows] = (d_scores @ chunk.key).view(*p.shape[:3], key.shape[3])
        if key_sum is not None:
            key_sum[:, :, keys] += d_scores.transpose(-1, -2) @ fold_groups(chunk.query.to(dtype), kv_heads)
    for grad, total in ((d_key, key_sum), (d_value, value_sum), (d_bias_keys, bias_sum)):
        if grad is not None and total is not None:
            grad.copy_(total)


def _scores(problem: Problem) -> int:
    """Of one row of each (batch, head)."""
    batch, heads = problem.query.shape[:2]
    return batch * heads * problem.key.shape[2]


def _chunks(problem: Problem, scores: int) -> Iterator[tuple[slice, slice, Problem]]:
    """(row slice, key slice, `problem` restricted to those query rows and keys, which are all that the rows see).

    `scores` is how many numbers are alive for a row.
    """
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    step = max(MIN_ROWS, CHUNK_SCORES // max(1, scores))
    if problem.left is not None or problem.right is not None:
        step = min(step, WINDOW_ROWS)
    of_places = problem.bias if problem.zero is None else None  # a table is every chunk's
    parts: Iterable[tuple[slice, slice]] = ((slice(start, min(start + step, len_q)), slice(0, len_k)) for start in range(0, len_q, step))
    first, last = problem.first, problem.last
    if first is not None and last is not None and first.is_cpu and len_q > MIN_ROWS and problem.seed is None:  # dropout counts all keys
        parts = _parts_of_intervals(first, last, len_q, len_k, step)
    for rows, keys in parts:
        keys = _in_window(problem, rows, keys)
        mask, bias = (None if x is None else _part(_part(x, 2, rows), 3, keys) for x in (problem.mask, of_places))
        begins, ends = (None if x is None else _part(x, 2, keys) for x in (first, last))
        query, key, value = problem.query[:, :, rows], problem.key[:, :, keys], problem.value[:, :, keys]
        bias = problem.bias if problem.zero is not None else bias
        yield rows, keys, problem._replace(query=query, key=key, value=value, mask=mask, bias=bias, first=begins, last=ends)


def _in_window(problem: Problem, rows: slice, keys: slice) -> slice:
    """Those of `keys` that the window leaves one of `rows`; all of them under dropout, which counts all keys."""
    if problem.seed is not None:
        return keys
    offset = problem.key.shape[2] - problem.query.shape[2]
    start = keys.start if problem.left is None else max(keys.start, rows.start + offset - problem.left)
    stop = keys.stop if problem.right is None else min(keys.stop, rows.stop + offset + problem.right)
    return slice(start, stop) if start < stop else slice(0, 0)


def _parts_of_intervals(first: Tensor, last: Tensor, len_q: int, len_k: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Slices of at most `step` rows, each with the keys from the first to the last that it sees, in any batch entry and head.

    Where intervals that have begun have all ended, as between packed sequences, slices end too and are shorter: of no other sequence is a key
    computed then.
    """
    first, last = (x.expand(*x.shape[:2], len_k).clamp(0, len_q) for x in torch.broadcast_tensors(first, last))
    any_row = first < last
    begun, ended = (torch.bincount(x[any_row], minlength=len_q + 1).cumsum(0) for x in (first, last))
    ends = ((begun[:-1] == ended[1:]).nonzero()[:, 0] + 1).tolist()
    if len(ends) > 1:
        step = min(step, PACKED_ROWS)
    start = 0
    while start < len_q:
        stop = min(start + step, len_q)
        before = bisect_right(ends, stop)
        if before and ends[before - 1] > start:
            stop = ends[before - 1]
        seen = ((first < stop) & (last > start) & any_row).any(0).any(0).nonzero()
        yield slice(start, stop), slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
        start = stop


def _part(x: Tensor, axis: int, places: slice) -> Tensor:
    """`x` at some places of an axis, which may also be 1 for all."""
    return x if x.shape[axis] == 1 else x.narrow(axis, places.start, places.stop - places.start)


def _aligned_length(problem: Problem, keys: slice) -> int:
    """The number of queries for :func:`masked_scores`: as many less as there are keys behind `keys`, as the last of both stand side by side."""
    return problem.query.shape[2] - (problem.key.shape[2] - keys.stop)


def _compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.query.dtype == torch.float64 else torch.float32
