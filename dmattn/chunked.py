"""The PyTorch path, for CPU tensors and float64: the formulas over chunks of query rows, which all (batch, head) compute together.

Temporaries are a few times the scores of a chunk: CHUNK_SCORES, or where that is more, MIN_ROWS rows of each (batch, head). Half precision
is computed in float32 and rounded once, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .broadcast import per_query_gradient, sum_to
from .problem import Problem
from .reference import attend, fold_groups, kept_factor, masked_scores

CHUNK_SCORES = 1 << 22  # scores alive at a time: 16 MiB in float32, a few times over in temporaries
MIN_ROWS = 16


@torch.no_grad()
def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Write (out, lse) of `problem`."""
    dtype = _compute_dtype(problem)
    problem = problem._replace(key=problem.key.to(dtype), value=problem.value.to(dtype))
    for rows, chunk in _chunks(problem):
        out[:, :, rows], lse[:, :, rows] = attend(chunk, dtype, rows.start, problem.query.shape[2])


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
    if d_bias is not None and d_bias.shape[3] == 1:
        per_query_gradient(lse, d_lse, d_bias)
        d_bias = None
    d_bias_rows, d_bias_keys = (d_bias, None) if d_bias is not None and d_bias.shape[2] > 1 else (None, d_bias)
    key_sum, value_sum, bias_sum = (
        None if grad is None else torch.zeros(grad.shape, dtype=dtype, device=grad.device) for grad in (d_key, d_value, d_bias_keys)
    )
    for rows, chunk in _chunks(problem._replace(key=key, value=value)):
        scores, tanh = masked_scores(chunk, dtype, rows.start, problem.query.shape[2])
        empty = lse[:, :, rows, None] == float("-inf")
        p = torch.softmax(scores.masked_fill_(empty, 0.0), -1)
        d_out_rows = d_out[:, :, rows].to(dtype).masked_fill(empty, 0.0)
        factor = None if problem.seed is None else kept_factor(chunk, dtype, rows.start)
        if value_sum is not None:
            weights = p if factor is None else p * factor
            value_sum += fold_groups(weights, kv_heads).transpose(-1, -2) @ fold_groups(d_out_rows, kv_heads)
        delta = (d_out_rows * out[:, :, rows]).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - d_lse[:, :, rows, None]
        d_p = (fold_groups(d_out_rows, kv_heads) @ value.transpose(-1, -2)).view(p.shape)
        if factor is not None:
            d_p *= factor
        d_scores = (p * (d_p - delta)).masked_fill_(empty, 0.0)
        if d_bias_rows is not None:  # each chunk has rows of its own
            d_bias_rows[:, :, rows] = sum_to(d_scores, d_bias_rows[:, :, rows].shape)
        if bias_sum is not None:
            bias_sum += sum_to(d_scores, bias_sum.shape)
        if tanh is not None:
            d_scores = d_scores * (1 - tanh * tanh)
        d_scores = fold_groups(d_scores * problem.scale, kv_heads)
        if d_query is not None:
            d_query[:, :, rows] = (d_scores @ key).view(*p.shape[:3], key.shape[3])
        if key_sum is not None:
            key_sum += d_scores.transpose(-1, -2) @ fold_groups(chunk.query.to(dtype), kv_heads)
    for grad, total in ((d_key, key_sum), (d_value, value_sum), (d_bias_keys, bias_sum)):
        if grad is not None and total is not None:
            grad.copy_(total)


def _chunks(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """(row slice, `problem` restricted to those query rows)."""
    batch, heads, len_q, _ = problem.query.shape
    step = max(MIN_ROWS, CHUNK_SCORES // max(1, batch * heads * problem.key.shape[2]))
    for start in range(0, len_q, step):
        rows = slice(start, min(start + step, len_q))
        mask, bias = (x[:, :, rows] if x is not None and x.shape[2] > 1 else x for x in (problem.mask, problem.bias))
        yield rows, problem._replace(query=problem.query[:, :, rows], mask=mask, bias=bias)


def _compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.query.dtype == torch.float64 else torch.float32
