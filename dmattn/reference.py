"""The oracle: attention as the specification writes it, in plain PyTorch with ordinary autograd, any dtype and device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import distances, dropout
from .biases import FactoredBias, RelativeBias
from .bits import unpacked
from .block_mask import BlockMask
from .broadcast import per_query_head
from .checks import Window
from .masks import IntervalMask
from .problem import Problem

MASKING = torch.finfo(torch.float32).min / 1.4426950408889634  # a bias below is -inf in base 2, in which the kernels compute

__all__ = ["attention", "dynamic_mask"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | IntervalMask | BlockMask | None = None,
    bias: Tensor | FactoredBias | RelativeBias | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same function as :func:`dmattn.attention`, materialising (..., H, Sq, Sk), computed and returned in `dtype`.

    Args are those of :func:`dmattn.attention`; from the same state of torch's generator dropout drops the same. `dtype` defaults to the
    query's. ``dtype=torch.float64`` on inputs already rounded to their own dtype is the truth against which the library is tested. Gradients
    come from autograd, of any order.
    """
    if isinstance(bias, FactoredBias):
        bias = bias.to_dense(torch.float64)
    options: dict[str, Any] = dict(mask=mask, bias=bias, causal=causal, window=window, scale=scale, softcap=softcap, dropout_p=dropout_p)
    problem = Problem.canonical(query, key, value, **options, sinks=sinks)
    with torch.autocast(problem.query.device.type, enabled=False):
        out, lse = attend(problem, dtype or query.dtype)
    return (out, lse) if return_lse else out


def dynamic_mask(scores: Tensor, keep: int, *, len_q: int, causal: bool = True, valid: Tensor | None = None) -> Tensor:
    """The mask of :func:`dmattn.dynamic_mask_attention` pair by pair: (..., Sq, Sk) bool, True where a query keeps a key.

    Query i keeps the `keep` best of the keys it sees: by score, and of equal scores the later. It sees the keys that are `valid`, and under
    `causal` no later than i + Sk - Sq. `scores` is (..., Sk), `valid` broadcasts to it.
    """
    scores = scores.detach().float()
    position = torch.arange(scores.shape[-1], device=scores.device)
    better = scores[..., :, None] > scores[..., None, :]  # [..., rival, key]
    better |= (scores[..., :, None] == scores[..., None, :]) & (position[:, None] > position)
    visible = torch.ones((*scores.shape[:-1], len_q, scores.shape[-1]), dtype=torch.bool, device=scores.device)
    if valid is not None:
        visible &= valid[..., None, :]
    if causal:
        visible &= position <= torch.arange(len_q, device=scores.device)[:, None] + scores.shape[-1] - len_q
    return visible & (visible.double() @ better.double() < keep)


def attend(
    problem: Problem, dtype: torch.dtype, row_start: int = 0, len_q: int | None = None, number: int = 0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of the queries in `problem`, computed in `dtype`; for `row_start` and `len_q` see :func:`masked_scores`.

    `number` is that of the first batch entry, by which dropout counts.
    """
    scores, _ = masked_scores(problem, dtype, row_start, len_q)
    scores = with_sinks(scores, problem.sinks)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = logsumexp(scores, -1)
    probabilities = torch.softmax(scores, -1)  # exp(scores - lse) has lost the sum where lse is so large that log n is below its last digit
    if problem.sinks is not None:
        probabilities = probabilities[..., :-1]  # a sink has no value
    if problem.seed is not None:
        probabilities = probabilities * kept_factor(problem, dtype, row_start, number)
    kv_heads = problem.value.shape[-3]
    out = (fold_groups(probabilities, kv_heads) @ problem.value.to(dtype)).view(*scores.shape[:-1], problem.value.shape[-1])
    return out.masked_fill(empty, 0.0), lse.masked_fill(empty, float("-inf")).squeeze(-1)


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """torch's, keeping `dim`, with the softmax as its gradient: torch's own is exp(x - logsumexp), which a huge offset of all x makes wrong."""
    lse = torch.logsumexp(x, dim, keepdim=True)
    if torch.is_grad_enabled():
        lse = lse.detach()
        lse = lse + torch.logsumexp(x - lse, dim, keepdim=True)
    return lse


def masked_scores(problem: Problem, dtype: torch.dtype, row_start: int = 0, len_q: int | None = None) -> tuple[Tensor, Tensor | None]:
    """(scores, -inf where hidden; tanh of the capped score, or None without softcap), both (..., H, rows, Sk) in `dtype`.

    The queries in `problem` stand at `row_start` of a sequence of `len_q`, by default they are the whole of it. Positions are taken in
    the whole sequence, so a slice of the rows gives that slice of the answer: :mod:`dmattn.execution.torch_path` bounds its memory this way.
    """
    query, key = problem.query.to(dtype), problem.key.to(dtype)
    *leading, heads, rows, _ = query.shape
    kv_heads, len_k = key.shape[-3:-1]
    scores = (fold_groups(query, kv_heads) @ key.transpose(-1, -2)).view(*leading, heads, rows, len_k) * problem.scale
    tanh = None
    if problem.softcap is not None:
        tanh = torch.tanh(scores / problem.softcap)
        scores = problem.softcap * tanh
    len_q = rows if len_q is None else len_q
    if problem.bias is not None:
        scores = scores + masking_bias(problem, dtype, row_start, len_q)
    hidden = hidden_pairs(problem, row_start, rows, len_q)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf")), tanh


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores (..., H, rows, Sk) with those of the sinks (H,) as of one more key, if there are any. No rule on pairs applies to them."""
    if sinks is None:
        return scores
    sinks = masking(sinks[:, None, None].to(scores.dtype))
    return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)


def masking_bias(problem: Problem, dtype: torch.dtype, row_start: int, len_q: int) -> Tensor:
    """The bias of :func:`masked_scores`, of query heads or 1, with -inf where it masks; of distances pair by pair."""
    assert problem.bias is not None
    bias = masking(per_query_head(problem.bias, problem.query.shape[-3]).to(dtype))
    if problem.zero is None:
        return bias
    return distances.of_pairs(bias[..., 0, :], problem.zero, row_start, problem.query.shape[-2], len_q, problem.key.shape[-2])


def masking(bias: Tensor) -> Tensor:
    """A bias with -inf where it masks."""
    return bias.masked_fill(bias < MASKING, float("-inf"))


def kept_factor(problem: Problem, dtype: torch.dtype, row_start: int = 0, number: int = 0) -> Tensor:
    """What dropout multiplies the probabilities by: 1 / (1 - p) for a pair that is kept, else 0; (..., H, rows, Sk)."""
    assert problem.seed is not None
    *leading, heads, rows, _ = problem.query.shape
    len_k = problem.key.shape[-2]
    kept = dropout.kept(problem.seed, problem.dropout_p, (math.prod(leading), heads, rows, len_k), row_start, number)
    return kept.view(*leading, heads, rows, len_k).to(dtype) * dropout.kept_scale(problem.dropout_p)


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """(..., H, rows, n) as (..., Hk, G * rows, n): the query heads of a group stacked, so that K and V are not repeated."""
    *leading, heads, rows, n = x.shape
    return x.reshape(*leading, kv_heads, heads // kv_heads * rows if kv_heads else 0, n)


def hidden_pairs(problem: Problem, row_start: int, rows: int, len_q: int) -> Tensor | None:
    """True where the mask or block mask, the intervals or the window keep a query from a key; None when nothing does."""
    heads, len_k, device = problem.query.shape[-3], problem.key.shape[-2], problem.query.device
    query = torch.arange(row_start, row_start + rows, device=device)[:, None]
    distance = torch.arange(len_k, device=device) - (query + len_k - len_q)
    hidden = []
    if problem.right is not None:
        hidden.append(distance > problem.right)
    if problem.left is not None:
        hidden.append(distance < -problem.left)
    if problem.mask is not None:
        hidden.append(~per_query_head(problem.mask, heads))
    if problem.blocks is not None and problem.bits is not None:
        hidden.append(~per_query_head(unpacked(problem.blocks, problem.bits, len_k, row_start, row_start + rows), heads))
    if problem.first is not None and problem.last is not None:
        first, last = (per_query_head(bound[..., None, :], heads) for bound in (problem.first, problem.last))
        outside = (query < first) | (query >= last)
        if problem.also_first is not None and problem.also_last is not None:
            first, last = (per_query_head(bound[..., None, :], heads) for bound in (problem.also_first, problem.also_last))
            outside = outside & ((query < first) | (query >= last))
        hidden.append(outside)
    union = None
    for condition in hidden:
        union = condition if union is None else union | condition
    return union
