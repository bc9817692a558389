"""PyTorch's attention kernel for CPUs, which never writes the scores of a block to memory, for what it computes exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..broadcast import per_query_head
from ..masks import BOUNDS
from ..problem import Problem
from ..reference import hidden_pairs, logsumexp, masking_bias, with_sinks

FEWEST_QUERIES = 32  # of fewer, the formulas take no longer than a look at the keys and a copy of them for each query head
# The fields of a problem that it computes by, or that change no result: a further one refuses it. Without a seed dropout_p drops nothing.
UNDERSTOOD = {"query", "key", "value", "mask", *BOUNDS, "bias", "zero", "left", "right", "scale", "order", "sinks", "dropout_p", "states"}
LARGEST_PRODUCT = 1e37  # a score that overflowed would count as hidden, but its row would not as empty


def serves(problem: Problem) -> bool:
    """Whether the forward pass of `problem` is exact by the kernel, and faster. It knows neither softcap nor our dropout, and one head dim."""
    query, key = problem.query, problem.key
    if any(x is not None for name, x in zip(problem._fields, problem, strict=True) if name not in UNDERSTOOD):
        return False
    if not query.is_cpu or query.dtype == torch.float64:
        return False
    if query.shape[2] < FEWEST_QUERIES or key.shape[2] == 0 or key.shape[3] != problem.value.shape[3]:  # it divides by zero without keys
        return False
    largest = query.abs().max().item() * key.abs().max().item() * key.shape[3] * max(1.0, abs(problem.scale))
    return largest <= LARGEST_PRODUCT  # which no NaN is


def prepared(problem: Problem) -> Problem:
    """`problem` with a key and a value as :func:`attend` takes them: for each query head, with rows that are dense and apart."""
    heads = problem.query.shape[1]
    return problem._replace(key=_dense_rows(per_query_head(problem.key, heads)), value=_dense_rows(per_query_head(problem.value, heads)))


def scores_added(problem: Problem) -> int:
    """How many numbers :func:`attend` writes for each query: of the pairs, those between which mask, intervals, window or bias differ."""
    ruling = [x for x in (problem.mask, problem.bias, *(getattr(problem, name) for name in BOUNDS)) if x is not None]
    if not ruling and problem.left is None and problem.right is None:
        return 0
    batch, heads = (max((x.shape[axis] for x in ruling), default=1) for axis in (0, 1))
    return batch * heads * problem.key.shape[2]


def attend(problem: Problem, dtype: torch.dtype, row_start: int = 0, len_q: int | None = None) -> tuple[Tensor, Tensor]:
    """:func:`dmattn.reference.attend` of a problem that :func:`serves` and :func:`prepared` have seen, in float32."""
    query = _dense_rows(problem.query.to(dtype))
    rows, len_k = query.shape[2], problem.key.shape[2]
    if len_k == 0:
        return _joined(query.new_zeros(query.shape), query.new_full(query.shape[:3], float("-inf")), problem.sinks)
    added = _added(problem, dtype, row_start, rows if len_q is None else len_q)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attention(query, problem.key, problem.value, attn_mask=added, scale=problem.scale)
    if added is not None:
        empty = (added == float("-inf")).all(-1)
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))
    return _joined(out, lse, problem.sinks)


def _joined(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks, if there are any, beside all keys of a row, which are as one whose score is their lse."""
    if sinks is None:
        return out, lse
    scores = with_sinks(lse[..., None], sinks)  # (B, H, rows, 2)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    share = torch.softmax(scores, -1)[..., :1]
    return out * share, logsumexp(scores, -1).masked_fill(empty, float("-inf")).squeeze(-1)


def _added(problem: Problem, dtype: torch.dtype, row_start: int, len_q: int) -> Tensor | None:
    """Bias, and -inf where a pair is hidden, with four axes that are full or 1; None where nothing is added."""
    hidden = hidden_pairs(problem, row_start, problem.query.shape[2], len_q)
    bias = None if problem.bias is None else masking_bias(problem, dtype, row_start, len_q)
    if hidden is None:
        return bias
    hidden = hidden[(None,) * (4 - hidden.ndim)]
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return torch.where(hidden, float("-inf"), bias)


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel takes any element for the next of its row, and reads rows as a matrix."""
    return x if x.stride(3) == 1 and x.stride(2) >= x.shape[3] else x.contiguous()
