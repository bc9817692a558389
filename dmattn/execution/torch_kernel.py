"""PyTorch's attention kernel for CPUs, which never writes the scores of a block to memory, for what it computes exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..broadcast import per_query_head
from ..masks import BOUNDS
from ..problem import Problem
from ..reference import hidden_pairs, logsumexp, masking_bias, with_sinks

FEWEST_QUERIES = 32  # of fewer, the formulas take no longer than a look at the keys and a copy of them for each query head
# The fields of a problem that it computes by, or that change no result: a further one refuses it. Without a seed dropout_p drops nothing.
UNDERSTOOD = {"query", "key", "value", "mask", *BOUNDS, "bias", "zero", "left", "right", "scale", "order", "sinks", "dropout_p", "states"}
UNDERSTOOD |= {"blocks", "bits"}  # of which the chunks are masks
LARGEST_PRODUCT = 1e37  # a score that overflowed would count as hidden, but its row would not as empty


def serves(problem: Problem) -> bool:
    """Whether the forward pass of `problem` is exact by the kernel, and faster. It knows neither softcap nor our dropout, and one head dim."""
    query, key = problem.query, problem.key
    if any(x is not None for name, x in zip(problem._fields, problem, strict=True) if name not in UNDERSTOOD):
        return False
    if not query.is_cpu or query.dtype == torch.float64:
        return False
    if query.shape[-2] < FEWEST_QUERIES or key.shape[-2] == 0 or key.shape[-1] != problem.value.shape[-1]:  # it divides by zero without keys
        return False
    largest = query.abs().max().item() * key.abs().max().item() * key.shape[-1] * max(1.0, abs(problem.scale))
    return largest <= LARGEST_PRODUCT  # which no NaN is


def prepared(problem: Problem) -> Problem:
    """`problem` with a key and a value as :func:`attend` takes them: four axes, for each query head, with rows that are dense and apart."""
    heads = problem.query.shape[-3]
    key, value = (_dense_rows(_one_batch_axis(per_query_head(x, heads))) for x in (problem.key, problem.value))
    return problem._replace(key=key, value=value)


def scores_added(problem: Problem) -> int:
    """How many numbers :func:`attend` writes for each query: of the pairs, those between which mask, intervals, window or bias differ."""
    ruling = [x for x in (problem.mask, problem.blocks, problem.bias, *(getattr(problem, name) for name in BOUNDS)) if x is not None]
    if not ruling and problem.left is None and problem.right is None:
        return 0
    leading = _broadcast_alike([x.shape[:-2] if x.ndim == problem.query.ndim else x.shape[:-1] for x in ruling], problem.query.shape[:-2])
    return math.prod(leading) * problem.key.shape[-2]


def attend(
    problem: Problem, dtype: torch.dtype, row_start: int = 0, len_q: int | None = None, number: int = 0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`dmattn.reference.attend` of a problem that :func:`serves` and :func:`prepared` have seen, in float32."""
    query = problem.query.to(dtype)
    rows, len_k = query.shape[-2], problem.key.shape[-2]
    if len_k == 0:
        return _joined(query.new_zeros(query.shape), query.new_full(query.shape[:-1], float("-inf")), problem.sinks)
    added = _added(problem, dtype, row_start, rows if len_q is None else len_q)
    if added is not None and query.ndim != 4:
        sizes = _broadcast_alike([added.shape[:-2]], query.shape[:-2])
        added = _one_batch_axis(added.expand(*sizes, *added.shape[-2:]))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attention(_dense_rows(_one_batch_axis(query)), problem.key, problem.value, attn_mask=added, scale=problem.scale)
    if added is not None:
        empty = (added == float("-inf")).all(-1)
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))
    return _joined(out.reshape(query.shape), lse.reshape(query.shape[:-1]), problem.sinks)


def _broadcast_alike(shapes: Sequence[Sequence[int]], full: Sequence[int]) -> list[int]:
    """Sizes of leading axes and heads that shapes broadcast to: the leading axes are all full or, if each shape shares all of them, all 1."""
    heads = max((shape[-1] for shape in shapes), default=1)
    shared = all(size == 1 for shape in shapes for size in shape[:-1])
    return [*([1] * (len(full) - 1) if shared else full[:-1]), heads]


def _one_batch_axis(x: Tensor) -> Tensor:
    """`x` with four axes."""
    return x if x.ndim == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _joined(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks, if there are any, beside all keys of a row, which are as one whose score is their lse."""
    if sinks is None:
        return out, lse
    scores = with_sinks(lse[..., None], sinks)  # (..., H, rows, 2)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    share = torch.softmax(scores, -1)[..., :1]
    return out * share, logsumexp(scores, -1).masked_fill(empty, float("-inf")).squeeze(-1)


def _added(problem: Problem, dtype: torch.dtype, row_start: int, len_q: int) -> Tensor | None:
    """Bias, and -inf where a pair is hidden, with axes that are full or 1; None where nothing is added."""
    hidden = hidden_pairs(problem, row_start, problem.query.shape[-2], len_q)
    bias = None if problem.bias is None else masking_bias(problem, dtype, row_start, len_q)
    if hidden is None:
        return bias
    hidden = hidden[(None,) * (problem.query.ndim - hidden.ndim)]
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return torch.where(hidden, float("-inf"), bias)


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel takes any element for the next of its row, and reads rows as a matrix."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()
